"""Records the calls of a teacher's self-attention layers: their inputs and their attention weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..device.offloading import require_in_memory
from ..errors import InvalidConfigError, NotPatchedError, UnsupportedModelError
from ..layers import model_type_of
from ..layers.finding.attention_layers import find_attention_layers
from ..layers.finding.projections import any_projection_names, find_projection_names, in_features, query_heads
from ..layers.mixin import SynthesizerMixin
from ..layers.sentence_transformers import model_in
from ..logits.masks import AttentionMask
from ..synthesizers import HeadGroups, Synthesizer
from ..synthesizers.statistics import TeacherCall

Batch = dict[str, Any]
NOT_INPUTS = ("labels", "modality")
"""Keys of a batch that are no inputs of the model. `modality` comes from SentenceTransformers."""


@dataclass(frozen=True)
class LayerPair:
    """A synthesized layer and the teacher's layer with the same label, such as "encoder.3"."""

    label: str
    name: str
    student: SynthesizerMixin
    teacher: nn.Module


@dataclass(frozen=True)
class Learner:
    """A synthesizer to train, and the heads of its layer whose logits it makes."""

    pair: LayerPair
    synthesizer: Synthesizer
    heads: tuple[int, ...]


def learners_of(pair: LayerPair) -> list[Learner]:
    """A layer's synthesizer, or those of its groups of heads. Groups that keep stock attention have nothing to learn."""
    synthesizer = pair.student.synthesizer
    if isinstance(synthesizer, HeadGroups):
        return [Learner(pair, group, heads) for _, heads, group in synthesizer.members() if not group.is_stock]
    return [Learner(pair, synthesizer, tuple(range(synthesizer.num_heads)))]


def pair_layers(model: PreTrainedModel, teacher: PreTrainedModel) -> list[LayerPair]:
    """Pair the synthesized layers of a model with the same layers of its teacher.

    Raises:
        NotPatchedError: for a model without synthesized layers.
        UnsupportedModelError: for a teacher of another model type, depth, width or number of heads, or if it is the model itself.
    """
    if model is teacher:
        raise UnsupportedModelError(
            "The model is its own teacher. Keep a stock copy: teacher = copy.deepcopy(model) before patch_model(model, …)."
        )
    for module in (model, teacher):
        require_in_memory(module, f"A transfer reads and writes the weights of {type(module).__name__}")
    student_type, teacher_type = model_type_of(model).name, model_type_of(teacher).name
    if student_type != teacher_type:
        raise UnsupportedModelError(
            f"A {student_type} model cannot learn from a {teacher_type} model layer by layer: take the stock "
            f"model that was patched as teacher."
        )
    attention_layers, _ = find_attention_layers(model)
    teachers = {attention_layer.label: attention_layer.module for attention_layer in find_attention_layers(teacher)[0]}
    pairs = []
    for attention_layer in attention_layers:
        if not isinstance(attention_layer.module, SynthesizerMixin):
            continue
        if attention_layer.label not in teachers:
            raise UnsupportedModelError(
                f"The teacher has no layer {attention_layer.label!r}; its layers are {', '.join(teachers)}. Take the stock model "
                f"that was patched as teacher."
            )
        student_shape, teacher_shape = attention_layer.module.dimensions[:2], _shape(teachers[attention_layer.label])
        if student_shape != teacher_shape:
            raise UnsupportedModelError(
                f"Layer {attention_layer.label!r} of the model has hidden_size, heads = {student_shape}, of the teacher "
                f"{teacher_shape}. A transfer compares layers one by one, so the teacher must have the same shape: take the stock "
                f"model that was patched."
            )
        pairs.append(
            LayerPair(
                attention_layer.label, attention_layer.name, attention_layer.module, teachers[attention_layer.label]
            )
        )
    if not pairs:
        raise NotPatchedError(
            f"This {type(model).__name__} holds no synthesized attention to transfer to: call patch_model(model, …) first."
        )
    return pairs


def _shape(stock: nn.Module) -> tuple[int, int]:
    """The hidden_size and the number of heads of a stock attention module."""
    projection_names = find_projection_names(stock) or any_projection_names(stock)
    return in_features(stock.get_submodule(projection_names.fused or projection_names.query)), query_heads(stock)


@contextmanager
def observing(*models: PreTrainedModel, backend: str | None = None) -> Iterator[None]:
    """Inside the context, the models run without dropout and cache, and with the given attention backend."""
    configs: dict[int, tuple[Any, bool | None, str]] = {}
    training = [(module, module.training) for model in models for module in model.modules()]
    inner = [model_in(model) for model in models]
    for model in models:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                config = module.config
                configs[id(config)] = (config, getattr(config, "use_cache", None), config._attn_implementation)
    try:
        for config, use_cache, _ in configs.values():
            if use_cache:
                config.use_cache = False
        for model in models:
            model.eval()
        for model in inner:
            if backend is not None:
                model.set_attn_implementation(backend)
        yield
    finally:
        # set_attn_implementation of a model changes its parts, so the configs of parts come last.
        for config, use_cache, previous_backend in configs.values():
            if use_cache:
                config.use_cache = use_cache
            if backend is not None:
                config._attn_implementation = previous_backend
        for module, mode in training:
            module.training = mode


@dataclass(frozen=True)
class Call(TeacherCall):
    """One call of a teacher's layer, with its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Calls = dict[str, list[Call]]
"""The calls by label of the layer. A layer that is used several times, as in ALBERT, has several calls."""


def observe_calls(teacher: PreTrainedModel, pairs: list[LayerPair], batch: Batch) -> Calls:
    """Run the teacher and record the calls of each paired layer. It must be inside `observing(…, backend="eager")`.

    Raises:
        InvalidConfigError: for a batch that does not reach all these layers.
        UnsupportedModelError: for a layer that returns no weights.
    """
    calls: Calls = {pair.label: [] for pair in pairs}

    def request_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "output_attentions": True}

    def record(label: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]) -> None:
            calls[label].append(_call(module, args, kwargs, output))

        return hook

    handles = [pair.teacher.register_forward_hook(record(pair.label), with_kwargs=True) for pair in pairs]
    handles += [
        pair.teacher.register_forward_pre_hook(request_weights, with_kwargs=True)
        for pair in pairs
        if "output_attentions" in inspect.signature(pair.teacher.forward).parameters
    ]
    try:
        with torch.no_grad():
            teacher(**on_device(batch, teacher))
    finally:
        for handle in handles:
            handle.remove()
    unreached = [label for label, layer_calls in calls.items() if not layer_calls]
    if unreached:
        raise InvalidConfigError(
            f"A batch of {', '.join(batch)} does not reach layer {unreached[0]!r}. Give batches with the inputs of all parts "
            f"of the model that are patched, or hand over those parts alone (model and teacher)."
        )
    return calls


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]) -> Call:
    weights = weights_in(output, module)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    arguments = {**bound.arguments, **kwargs}
    batch, _, length, keys = weights.shape
    mask = arguments.get("attention_mask", arguments.get("mask"))
    # With the eager backend, no mask means that all keys are visible, even if the module says is_causal.
    visible = AttentionMask.from_tensor(mask).visible(length, keys, weights.device)
    if visible is None:
        visible = weights.new_ones((), dtype=torch.bool).view(1, 1, 1, 1)
    visible = visible.any(1).expand(batch, length, keys)  # (B, L, L): visible to some head
    rows = visible.diagonal(dim1=-2, dim2=-1)  # a token sees itself, and nothing sees padding
    hidden_states = args[0] if args else arguments["hidden_states"]
    # T5's layers return a position bias between output and weights; other layers get it as an argument.
    position_bias = output[1] if len(output) == 3 else arguments.get("position_bias")
    rotation = arguments.get("position_embeddings")
    if rotation is not None:
        rotation = rotation[0][0], rotation[1][0]
    pairs = visible & rows.unsqueeze(-1)
    return Call(hidden_states, weights, rows, pairs, position_bias, rotation, args, kwargs)


def weights_in(output: Any, module: nn.Module) -> torch.Tensor:
    """The attention weights (B, H, L, L) in the output of a layer's forward.

    Raises:
        UnsupportedModelError: if there are none.
    """
    last = output[-1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(last, torch.Tensor) or last.dim() != 4:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not return its attention weights, so a transfer cannot learn from it. Leave "
            f"these layers stock (layers=…), or train the patched model without a transfer."
        )
    return last


def synthesized_weights(layer: SynthesizerMixin, call: Call) -> torch.Tensor:
    """The attention weights (B, H, L, L) of a synthesized layer on the teacher's hidden states, with the eager backend."""
    device = next(layer.parameters()).device

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(item) for item in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args = tuple(move(value) for value in call.args)
    return weights_in(layer(*args, **{name: move(value) for name, value in call.kwargs.items()}), layer)


def on_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """Move a batch to the model's device and drop the labels. An encoder-decoder keeps them if it has no decoder inputs.

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
        if name not in NOT_INPUTS or (name == "labels" and keep_labels)
    }
