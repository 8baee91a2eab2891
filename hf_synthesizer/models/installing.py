"""Synthesized layers are put in the place of stock ones: in a model that is patched, and in one that is built from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.changes import Samples, sample_weights
from ..errors import (
    CheckpointMismatchError,
    InvalidConfigError,
)
from ..layers.attention_layers import AttentionLayer, find_attention_layers
from ..layers.patched import TAGS
from ..layers.stock_classes import is_stock_model
from ..upstream import require_missing_nothing
from ..upstream.transformers_names import record_outputs
from .classes import config_class, describes_patch, model_class
from .description import Description, Plan, config_for_layer, plan_from_json, plan_to_json
from .own_config import OwnConfig, replace_configs
from .served import PLACE, Served, build_layer
from .towers import stacks_here


@dataclass
class Undo:
    """What a patch replaced: by name the stock modules, the classes of the models in the model and their configs, and the
    tags; and some numbers of the weights that it left alone."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    model_classes: dict[str, type[PreTrainedModel]] = field(default_factory=dict)
    configs: dict[str, OwnConfig] = field(default_factory=dict)
    tags: list[str] | None = None
    weights: Samples = field(default_factory=dict)


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the patched layers that its config describes (for `from_pretrained`).

    Raises:
        CheckpointMismatchError: when the config describes none, or not the layers that the model has.
    """
    described = plan_from_json(getattr(model.config, "synthesizer", None))
    attention_layers, _ = find_attention_layers(model)
    described = described.with_stacks(stacks_here(described.depths, attention_layers, is_tower=described.is_tower))
    require_all_layers(model, attention_layers, described)
    try:
        plan = {
            attention_layer.label: config_for_layer(described.layers[attention_layer.label], attention_layer)
            for attention_layer in attention_layers
            if attention_layer.label in described.layers
        }
    except InvalidConfigError as error:
        raise CheckpointMismatchError(f"config.json describes heads that this model does not have. {error}") from error
    install(model, attention_layers, plan, described.served)


def require_all_layers(model: PreTrainedModel, attention_layers: list[AttentionLayer], described: Description) -> None:
    """Raise `CheckpointMismatchError` where a description and a model have other layers, some of which would be stock and random.

    A head may do without a stack that the description has (an encoder alone); a stack that is there is described, and as deep.
    """
    depths: dict[str, int] = {}
    for attention_layer in attention_layers:
        depths[attention_layer.stack] = depths.get(attention_layer.stack, 0) + 1
    for stack, depth in depths.items():
        there = described.depths.get(stack, 0)
        if there != depth:
            raise CheckpointMismatchError(
                f"config.json describes {there} self-attention layers of the stack {stack!r}, but this {type(model).__name__} "
                f"has {depth}: the others would be stock, with random weights. Repair the config's number of layers and its "
                f"'model_type', or its 'synthesizer' field."
            )


def install(
    model: PreTrainedModel, attention_layers: list[AttentionLayer], plan: Plan, saved: dict[str, Served] | None = None
) -> Undo:
    """Build everything first, then swap: what can fail comes before the first change.

    `saved` says how a checkpoint's layers were served.
    """
    require_missing_nothing()
    by = getattr(model.config, "transformers_version", None)
    example = next((p for p in model.parameters() if p.is_floating_point()), None)
    twins = {
        attention_layer.name: build_layer(
            attention_layer, plan[attention_layer.label], example, (saved or {}).get(attention_layer.label), by
        )
        for attention_layer in attention_layers
        if attention_layer.label in plan
    }
    models = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and type(module.config) is type(model.config)
        and (module is model or is_stock_model(type(module)))
    }
    undo = Undo(tags=model.model_tags, model_classes={name: type(module) for name, module in models.items()})
    if not describes_patch(model.config):  # one that is built from a checkpoint's config has it already
        served = {
            attention_layer.label: twins[attention_layer.name].__dict__["served"]
            for attention_layer in attention_layers
            if attention_layer.label in plan
        }
        description = plan_to_json(plan, attention_layers, served, base_model=_name_on_the_hub(model.config))
        own = {
            id(module.config): OwnConfig.of(module.config, config_class(type(module.config)), description)
            for module in models.values()
        }
        undo.configs = {name: own[id(module.config)] for name, module in models.items()}
    for name, twin in twins.items():
        undo.modules[name] = model.get_submodule(name)
        model.set_submodule(name, twin)
    for attention_layer in attention_layers:
        model.get_submodule(attention_layer.name).__dict__[PLACE] = (attention_layer.name, attention_layer.index)
    if undo.configs:
        undo.weights = sample_weights(model)
    replace_configs(model, [pair for config in undo.configs.values() for pair in config.pairs()])
    for module in models.values():
        if is_stock_model(type(module)):
            set_class(module, model_class(type(module)))
    model.model_tags = list(dict.fromkeys([*(undo.tags or ()), *TAGS]))
    return undo


def _name_on_the_hub(config: PreTrainedConfig) -> str | None:
    """Where the stock weights came from, unless that was a folder, which means nothing elsewhere."""
    name = config.name_or_path
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return None if not name or Path(name).exists() else name


def set_class(model: PreTrainedModel, cls: type[PreTrainedModel]) -> None:
    """Give a model another class, in place."""
    model.__class__ = cls
    record_outputs(model)
