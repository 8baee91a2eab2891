"""Watch a teacher attend: what goes into each self-attention layer, and which weights come out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import InvalidConfigError, NotPatchedError, UnsupportedModelError
from ..faces import family_of
from ..faces.mixin import SynthesizerMixin
from ..masks import AttentionMask
from ..patching.slots import find_slots

Batch = dict[str, Any]


@dataclass(frozen=True)
class LayerPair:
    """A synthesized layer, and the teacher's layer in the same place, called `label` ("encoder.3") in both."""

    label: str
    name: str
    student: SynthesizerMixin
    teacher: nn.Module


def pair_layers(model: PreTrainedModel, teacher: PreTrainedModel) -> list[LayerPair]:
    """The synthesized layers of a model beside the same layers of its teacher.

    Raises:
        NotPatchedError: for a model without synthesized layers.
        UnsupportedModelError: for a teacher of another family, depth, width or number of heads, or the model itself.
    """
    if model is teacher:
        raise UnsupportedModelError(
            "The model is its own teacher. Keep a stock copy: teacher = copy.deepcopy(model) before patch_model(model, …)."
        )
    ours_is, theirs_is = family_of(model).name, family_of(teacher).name
    if ours_is != theirs_is:
        raise UnsupportedModelError(
            f"A {ours_is} model cannot learn from a {theirs_is} model layer by layer: take the stock "
            f"model that was patched as teacher."
        )
    slots, _ = find_slots(model)
    teachers = {slot.label: slot.module for slot in find_slots(teacher)[0]}
    pairs = []
    for slot in slots:
        if not isinstance(slot.module, SynthesizerMixin):
            continue
        if slot.label not in teachers:
            raise UnsupportedModelError(
                f"The teacher has no layer {slot.label!r}; its layers are {', '.join(teachers)}. Take the stock model "
                f"that was patched as teacher."
            )
        ours, theirs = _shape(model), _shape(teacher)
        if ours != theirs:
            raise UnsupportedModelError(
                f"The model has hidden_size, heads = {ours}, the teacher {theirs}. Layers are taught one by one, so the "
                f"teacher must be of the model's own shape: take the stock model that was patched."
            )
        pairs.append(LayerPair(slot.label, slot.name, slot.module, teachers[slot.label]))
    if not pairs:
        raise NotPatchedError(
            f"This {type(model).__name__} holds no synthesized attention to transfer to: call patch_model(model, …) first."
        )
    return pairs


def _shape(model: PreTrainedModel) -> tuple[int, int]:
    return model.config.hidden_size, model.config.num_attention_heads


@contextmanager
def observing(*models: PreTrainedModel, backend: str | None = None) -> Iterator[None]:
    """Inside, the models run without dropout and cache, and with the given attention backend; then as before."""
    configs: dict[int, tuple[Any, bool | None]] = {}
    backends = [(model, model.config._attn_implementation) for model in models]
    training = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                configs[id(module.config)] = (module.config, getattr(module.config, "use_cache", None))
    try:
        for config, use_cache in configs.values():
            if use_cache:
                config.use_cache = False
        for model in models:
            model.eval()
            if backend is not None:
                model.set_attn_implementation(backend)
        yield
    finally:
        for config, use_cache in configs.values():
            if use_cache:
                config.use_cache = use_cache
        for model, before in backends:
            if backend is not None:
                model.set_attn_implementation(before)
        for module, mode in training:
            module.training = mode


@dataclass(frozen=True)
class Call:
    """One call of a teacher's layer.

    `hidden_states` (B, L, d) went in, `weights` (B, H, L, L) are what it attended to, `rows` (B, L) says which queries are tokens, and `pairs`
    (B, L, L) which of their keys may be looked at. `position_bias` (1, H, L, L) is what T5 adds to its logits.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_states: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    pairs: torch.Tensor
    position_bias: torch.Tensor | None


def observe_calls(teacher: PreTrainedModel, pairs: list[LayerPair], batch: Batch) -> dict[str, Call]:
    """Run the teacher, which is under `observing(…, backend="eager")`, and keep the call of each paired layer."""
    calls: dict[str, Call] = {}

    def watch(label: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]) -> None:
            calls[label] = _call(module, args, kwargs, output)

        return hook

    handles = [pair.teacher.register_forward_hook(watch(pair.label), with_kwargs=True) for pair in pairs]
    try:
        with torch.no_grad():
            teacher(**on_device(batch, teacher))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]) -> Call:
    weights = output[-1]
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    mask = bound.get("attention_mask", bound.get("mask"))
    batch, _, length, _ = weights.shape
    causal = 0 if getattr(module, "is_causal", False) and mask is None else None
    visible = AttentionMask.from_tensor(mask, causal).visible(length, length, weights.device)
    if visible is None:
        visible = weights.new_ones((), dtype=torch.bool)
    visible = visible.expand(batch, 1, length, length)[:, 0]  # (B, L, L)
    rows = visible.diagonal(dim1=-2, dim2=-1)  # a token may look at itself, padding may not be looked at
    position_bias = output[1] if len(output) == 3 else None
    return Call(args, kwargs, bound["hidden_states"], weights, rows, visible & rows.unsqueeze(-1), position_bias)


def synthesized_weights(layer: SynthesizerMixin, call: Call) -> torch.Tensor:
    """What a synthesized layer (under eager) attends to when it gets the teacher's hidden states: (B, H, L, L)."""
    device = next(layer.parameters()).device

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args = tuple(move(value) for value in call.args)
    return layer(*args, **{name: move(value) for name, value in call.kwargs.items()})[-1]


def on_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """The batch where the model is, without the labels (an encoder-decoder needs them to know what it decodes).

    Raises:
        InvalidConfigError: for a batch that is not a mapping of the model's inputs.
    """
    if not isinstance(batch, Mapping):
        raise InvalidConfigError(
            f"The dataloader must yield dicts of the model's inputs, such as input_ids and attention_mask; it yielded "
            f"{type(batch).__name__}. Give it a collate_fn such as transformers.DataCollatorWithPadding."
        )
    keep_labels = model.config.is_encoder_decoder and "decoder_input_ids" not in batch
    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels" or keep_labels
    }
