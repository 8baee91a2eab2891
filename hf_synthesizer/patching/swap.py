"""Swap self-attention in a pretrained model, and undo it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..checkpoints.changes import Samples, changed_weights, sample_weights
from ..device.offloading import require_in_memory
from ..errors import (
    AlreadyPatchedError,
    CheckpointMismatchError,
    InvalidConfigError,
    NotPatchedError,
    UnsupportedModelError,
)
from ..layers.attention_layers import AttentionLayer, find_attention_layers
from ..layers.patched import TAGS, is_patched, synthesized_layers
from ..layers.sentence_transformers import lengthen_texts, model_of_sentences, shorten_texts
from ..layers.stock_classes import is_stock_model
from ..models.classes import config_class, describes_patch, model_class
from .adapters import require_no_adapters
from .description import Description, plan_from_json, plan_to_json
from .max_length import with_lengths
from .own_config import OwnConfig, replace_configs
from .plan import Layers, Plan, Spec, make_plan, with_heads
from .served import PLACE, Served, build_layer
from .towers import stacks_here

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)

_UNDO = "_synthesizer_undo"


@dataclass
class Undo:
    """What a patch replaced: by name the stock modules, the classes of the models in the model and their configs, and the
    tags; and some numbers of the weights that it left alone."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    model_classes: dict[str, type[PreTrainedModel]] = field(default_factory=dict)
    configs: dict[str, OwnConfig] = field(default_factory=dict)
    tags: list[str] | None = None
    weights: Samples = field(default_factory=dict)


def patch_model(
    model: Model, variant: Spec, *, layers: Layers = None, max_length: int | None = None, **options: Any
) -> Model:
    """Replace self-attention by synthesized attention, in place; returns the same model.

    The model gets a config of its own, a copy that says how it is patched: the stock one may be that of other models too.
    Where the model is a part of a larger one, hand it on (`whole.config = part.config`), so that the larger one saves it.

    Args:
        model: a stock Transformers model of a supported model type (see `list_model_types()`), with any head or none; or a
            SentenceTransformer around one, whose `max_seq_length` follows.
        variant: a name ("dense"), a mixture ("random+dot_product"), a `SynthesizerConfig`, or a hybrid
            `{layer: any of these}`, where a layer is an index, a stack ("encoder") or "stack.index". With `heads=[…]` a
            configuration is for some heads of a layer; a list of such makes several groups, and the heads that none names
            keep the stock attention. What `suggest_layers` and `suggest_heads` return is such a hybrid.
        layers: which layers; all if None. Indices, a slice, a predicate `(name, module) -> bool`, or for models with
            two stacks a dict such as `{"encoder": [0, 1], "decoder": True}`.
        max_length: the longest sequence N the logits are built for; the model's own maximum if None.
        **options: fields of `SynthesizerConfig`, or options of a registered variant.

    Raises:
        UnsupportedModelError: for a model that no model type serves, one that has adapters of PEFT, one that is offloaded or spread
            over devices by tensor parallelism, or one whose attention layers were given another forward.
        AlreadyPatchedError: for a model that holds synthesized attention.
        NoMatchingLayerError: for a selection that selects nothing.
        UnknownVariantError, InvalidConfigError: for a variant or an option that cannot be.

    A failed patch leaves the model as it was.
    """
    if max_length is not None:
        options["max_length"] = max_length
    inner = model_of_sentences(model)
    if inner is None:
        _patch(cast(PreTrainedModel, model), variant, layers, options)
    else:
        _patch(inner, variant, layers, options)
        shorten_texts(model, inner)
    return model


def _patch(model: PreTrainedModel, variant: Spec, layers: Layers, options: dict[str, Any]) -> None:
    attention_layers, _ = find_attention_layers(model)
    require_no_adapters(model)
    require_whole_layers(model)
    if is_patched(model):
        raise AlreadyPatchedError(
            f"This {type(model).__name__} is patched already. To patch several layers differently, say so in one call, "
            f"patch_model(model, {{0: 'random', 1: 'dense'}}); to start again, call unpatch_model(model) first."
        )
    if not attention_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no self-attention that goes through Transformers' attention interface, and none "
            f"that a layer class was registered for (see docs/models.md). To serve it, register its attention class: CONTRIBUTING.md."
        )
    plan = with_lengths(attention_layers, make_plan(attention_layers, variant, layers, options), model, model.config)
    undo = _install(model, attention_layers, plan)
    model.__dict__[_UNDO] = undo


def require_whole_layers(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for a model whose layers are spread over several devices by tensor parallelism."""
    size = getattr(model, "tp_size", None)
    if size is not None and size > 1:
        raise UnsupportedModelError(
            f"This {type(model).__name__} is spread over {size} devices by tensor parallelism, with some heads on each, but "
            f"synthesized logits are made for all heads at once. Patch the model before: load it without tp_plan, patch it, "
            f"save it, and load the patched checkpoint with tp_plan='auto'."
        )


def unpatch_model(model: Model) -> Model:
    """Undo `patch_model`, in place; returns the same model.

    What comes back: the stock attention layers with the queries and keys that they had, the model's class and its own
    config object (with what was set on the patched model's since). Where nothing was trained, loaded or edited meanwhile,
    the model computes bit for bit what it did before. All else stays as it is now: values, output projections,
    embeddings, feed-forward layers and the head are the same tensors in the patched model and the stock one, and so are
    the queries and keys of `dot_product` and its mixtures, as long as all heads have them. After training these are trained, and old queries and keys do
    not belong to them: a warning says so. It looks at some numbers of each parameter; sharded ones are not looked at.

    Raises:
        UnsupportedModelError: for a model that is offloaded.
        NotPatchedError: for a model that is not patched, or was loaded from a patched checkpoint, which holds no
            stock attention to go back to.
    """
    inner = model_of_sentences(model)
    if inner is None:
        _unpatch(cast(PreTrainedModel, model))
    else:
        _unpatch(inner)
        lengthen_texts(model)
    return model


def _unpatch(model: PreTrainedModel) -> None:
    require_in_memory(model, f"This {type(model).__name__} cannot be unpatched")
    undo: Undo | None = model.__dict__.get(_UNDO)
    if undo is None:
        patched = is_patched(model)
        reason = (
            "it was loaded from a patched checkpoint, or one of its submodules was patched: load the base checkpoint "
            "for the stock model, or call unpatch_model on what patch_model was called on"
            if patched
            else "it holds no synthesized attention"
        )
        raise NotPatchedError(f"This {type(model).__name__} cannot be unpatched: {reason}.")
    changed = changed_weights(model, undo.weights)
    if changed:
        logger.warning(
            "%d of the weights of this model have changed since it was patched, among them %s. They stay as they are, but the "
            "layers get back the queries and keys that they had before. For the model as it was, load its checkpoint again.",
            len(changed),
            changed[0],
        )
    twins = list(synthesized_layers(model))
    for name, twin in twins:
        stock = undo.modules.get(twin.__dict__.get(PLACE, (name,))[0])
        if stock is None:  # put there since
            continue
        example = next((t for t in (*twin.parameters(), *twin.buffers()) if t.is_floating_point()), None)
        if example is not None:  # a quantized layer may have none
            stock.to(device=example.device, dtype=example.dtype)
        stock.train(twin.training)
        model.set_submodule(name, stock)
    for module in model.modules():
        module.__dict__.pop(PLACE, None)
    back = []
    for name, config in undo.configs.items():
        current = cast(PreTrainedModel, model.get_submodule(name)).config
        back += [(new, old) for old, new in config.pairs()]
        back.append((current, config.stock_again(current)))
    replace_configs(model, back)
    for name, cls in undo.model_classes.items():
        _set_class(cast(PreTrainedModel, model.get_submodule(name)), cls)
    model.model_tags = undo.tags
    del model.__dict__[_UNDO]


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the patched layers that its config describes (for `from_pretrained`).

    Raises:
        CheckpointMismatchError: when the config describes none, or not the layers that the model has.
    """
    described = plan_from_json(getattr(model.config, "synthesizer", None))
    attention_layers, _ = find_attention_layers(model)
    described = described.with_stacks(stacks_here(described.depths, attention_layers))
    require_all_layers(model, attention_layers, described)
    try:
        plan = {
            attention_layer.label: with_heads(described.layers[attention_layer.label], attention_layer)
            for attention_layer in attention_layers
            if attention_layer.label in described.layers
        }
    except InvalidConfigError as error:
        raise CheckpointMismatchError(f"config.json describes heads that this model does not have. {error}") from error
    _install(model, attention_layers, plan, described.served)


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


def _install(
    model: PreTrainedModel, attention_layers: list[AttentionLayer], plan: Plan, saved: dict[str, Served] | None = None
) -> Undo:
    """Build everything first, then swap: what can fail comes before the first change.

    `saved` says how a checkpoint's layers were served.
    """
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
            _set_class(module, model_class(type(module)))
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


def _set_class(model: PreTrainedModel, cls: type[PreTrainedModel]) -> None:
    model.__class__ = cls
    # Filled in by __init__ only, for the class that a model had then; by the name of that class up to Transformers 5.22.
    key: Any = str(cls) if type(_CAN_RECORD_REGISTRY) is dict else model
    _CAN_RECORD_REGISTRY[key] = model._can_record_outputs
