"""Puts synthesized layers in place of stock ones: in a model that is patched, and in one that is built from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.changes import Samples, sample_weights
from ..errors import CheckpointMismatchError, InvalidConfigError
from ..layers.finding.attention_layers import AttentionLayer, find_attention_layers
from ..layers.finding.stock_classes import is_stock_model
from ..layers.patched import TAGS
from ..upstream import require_missing_nothing
from ..upstream.transformers_names import record_outputs
from .classes import config_class, describes_patch, model_class
from .description import Description, Plan, config_for_layer, plan_from_json, plan_to_json
from .patched_config import PatchedConfig, replace_configs
from .served import PLACE, Served, build_layer
from .towers import stacks_here


@dataclass
class Undo:
    """What a patch replaced: by name the stock modules, and the classes and configs of the models in the model; the tags. And
    some numbers of the weights that it did not replace."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    model_classes: dict[str, type[PreTrainedModel]] = field(default_factory=dict)
    configs: dict[str, PatchedConfig] = field(default_factory=dict)
    tags: list[str] | None = None
    weights: Samples = field(default_factory=dict)


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the patched layers that its config describes (for `from_pretrained`).

    Raises:
        CheckpointMismatchError: if the config describes none, or other layers than those of the model.
    """
    description = plan_from_json(getattr(model.config, "synthesizer", None))
    attention_layers, _ = find_attention_layers(model)
    names = stacks_here(description.depths, attention_layers, is_tower=description.is_tower)
    description = description.with_stacks(names)
    require_all_layers(model, attention_layers, description)
    try:
        plan = {
            layer.label: config_for_layer(description.layers[layer.label], layer)
            for layer in attention_layers
            if layer.label in description.layers
        }
    except InvalidConfigError as error:
        raise CheckpointMismatchError(f"config.json describes heads that this model does not have. {error}") from error
    install(model, attention_layers, plan, description.served)


def require_all_layers(
    model: PreTrainedModel, attention_layers: list[AttentionLayer], description: Description
) -> None:
    """Raise `CheckpointMismatchError` if a description lacks layers of the model, which would be stock with random weights.

    A model may lack a stack of the description (an encoder alone). A stack that is there must be described with all its layers.
    """
    depths: dict[str, int] = {}
    for layer in attention_layers:
        depths[layer.stack] = depths.get(layer.stack, 0) + 1
    for stack, depth in depths.items():
        described = description.depths.get(stack, 0)
        if described != depth:
            raise CheckpointMismatchError(
                f"config.json describes {described} self-attention layers of the stack {stack!r}, but this {type(model).__name__} "
                f"has {depth}: the others would be stock, with random weights. Repair the config's number of layers and its "
                f"'model_type', or its 'synthesizer' field."
            )


def install(
    model: PreTrainedModel, attention_layers: list[AttentionLayer], plan: Plan, saved: dict[str, Served] | None = None
) -> Undo:
    """Build all layers of a plan, then swap them. So an error leaves the model as it was.

    Args:
        model: with stock layers.
        attention_layers: of the model.
        plan: by the labels of the layers.
        saved: how a checkpoint's layers are served, by their labels.
    """
    require_missing_nothing()
    saved_by = getattr(model.config, "transformers_version", None)
    example = next((p for p in model.parameters() if p.is_floating_point()), None)
    synthesized = {
        layer: build_layer(layer, plan[layer.label], example, (saved or {}).get(layer.label), saved_by)
        for layer in attention_layers
        if layer.label in plan
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
        served = {layer.label: module.__dict__["served"] for layer, module in synthesized.items()}
        description = plan_to_json(plan, attention_layers, served, base_model=_name_on_the_hub(model.config))
        configs = {
            id(module.config): PatchedConfig.of(module.config, config_class(type(module.config)), description)
            for module in models.values()
        }
        undo.configs = {name: configs[id(module.config)] for name, module in models.items()}
    for layer in attention_layers:
        module = layer.module
        if layer in synthesized:
            module = synthesized[layer]
            undo.modules[layer.name] = layer.module
            model.set_submodule(layer.name, module)
        module.__dict__[PLACE] = (layer.name, layer.index)
    if undo.configs:
        undo.weights = sample_weights(model)
    replace_configs(model, [pair for config in undo.configs.values() for pair in config.pairs()])
    for module in models.values():
        if is_stock_model(type(module)):
            set_class(module, model_class(type(module)))
    model.model_tags = list(dict.fromkeys([*(undo.tags or ()), *TAGS]))
    return undo


def _name_on_the_hub(config: PreTrainedConfig) -> str | None:
    """The Hub's name of the stock weights. None if they came from a folder, which means nothing on another machine."""
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
