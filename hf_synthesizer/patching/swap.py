"""Swap self-attention in a pretrained model, and undo it."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.changes import changed_weights
from ..device.offloading import require_in_memory
from ..errors import AlreadyPatchedError, NotPatchedError, UnsupportedModelError
from ..layers.finding.attention_layers import find_attention_layers
from ..layers.patched import is_patched, synthesized_layers
from ..layers.sentence_transformers import lengthen_texts, model_of_sentences, shorten_texts
from ..models.installing import Undo, install, set_class
from ..models.patched_config import replace_configs
from ..models.served import PLACE
from .adapters import require_no_adapters
from .max_length import with_lengths
from .plan import Spec, make_plan
from .selection import Layers

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)

_UNDO = "_synthesizer_undo"


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
    plan = with_lengths(attention_layers, make_plan(attention_layers, variant, layers, options), model)
    undo = install(model, attention_layers, plan)
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
    for name, layer in list(synthesized_layers(model)):
        stock = undo.modules.get(layer.__dict__.get(PLACE, (name,))[0])
        if stock is None:  # a layer that was added after the patch
            continue
        example = next((t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), None)
        if example is not None:  # a quantized layer may have none
            stock.to(device=example.device, dtype=example.dtype)
        stock.train(layer.training)
        model.set_submodule(name, stock)
    for module in model.modules():
        module.__dict__.pop(PLACE, None)
    replacements = []
    for name, config in undo.configs.items():
        current = cast(PreTrainedModel, model.get_submodule(name)).config
        replacements += [(new, old) for old, new in config.pairs()]
        replacements.append((current, config.restore_stock(current)))
    replace_configs(model, replacements)
    for name, cls in undo.model_classes.items():
        set_class(cast(PreTrainedModel, model.get_submodule(name)), cls)
    model.model_tags = undo.tags
    del model.__dict__[_UNDO]
