"""The attention weights of every self-attention layer of a model, stock or patched, for some inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidConfigError, UnsupportedModelError
from ..layers.finding.attention_layers import find_attention_layers
from ..layers.mixin import SynthesizerMixin
from ..layers.sentence_transformers import model_in
from ..transfer.observe import observing, on_device

STOCK = "stock"


@dataclass(frozen=True)
class LayerWeights:
    """What one layer looks at: `weights` (B, H, L, L), float32 on the processor; `attention` is its variant, or "stock"."""

    label: str
    attention: str
    weights: torch.Tensor


def record(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[LayerWeights]:
    """Run a model once, under eager attention and without dropout, and keep the weights of its self-attention layers.

    The model is left as it was. An encoder-decoder without decoder inputs decodes what it reads.

    Raises:
        UnsupportedModelError: for a model without self-attention that gives its weights.
    """
    model, batch = model_in(model), dict(inputs)
    if model.config.is_encoder_decoder and not {"decoder_input_ids", "labels"} & batch.keys():
        batch["decoder_input_ids"] = batch["input_ids"]
    attention_layers, _ = find_attention_layers(model)
    found: dict[str, torch.Tensor] = {}

    def watch(label: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weights = output[-1] if isinstance(output, tuple) else None
            if isinstance(weights, torch.Tensor) and weights.dim() == 4:
                found[label] = weights.detach().float().cpu()

        return hook

    with contextlib.ExitStack() as stack:
        stack.enter_context(observing(model, backend="eager"))
        for attention_layer in attention_layers:
            stack.callback(attention_layer.module.register_forward_hook(watch(attention_layer.label)).remove)
        with torch.no_grad():
            model(**on_device(batch, model))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no self-attention layer that gives its weights, so that there is nothing to show."
        )
    return [
        LayerWeights(attention_layer.label, attention_of(attention_layer.module), found[attention_layer.label])
        for attention_layer in attention_layers
        if attention_layer.label in found
    ]


def read_by(model: PreTrainedModel, inputs: Mapping[str, Any], stack: str, row: int = 0) -> list[tuple[int, int]]:
    """What a stack of a model reads in a row of a batch: places and tokens, without padding."""
    model = model_in(model)
    name, mask = "input_ids", inputs.get("attention_mask")
    if model.config.is_encoder_decoder and stack == "decoder" and {"decoder_input_ids", "labels"} & inputs.keys():
        name, mask = "decoder_input_ids", inputs.get("decoder_attention_mask")
    if name in inputs:
        tokens = inputs[name][row]
    else:
        shift: Any = model.prepare_decoder_input_ids_from_labels
        tokens = shift(labels=inputs["labels"])[row]
    seen = [True] * len(tokens) if mask is None else mask[row].bool().tolist()
    return [(place, token) for place, (token, shown) in enumerate(zip(tokens.tolist(), seen, strict=True)) if shown]


def words_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Tokens as somebody reads them: without the marks of a space that byte pairs and sentence pieces have."""
    found = []
    for token in map(str, tokenizer.convert_ids_to_tokens(ids)):
        text = tokenizer.convert_tokens_to_string([token]).strip()
        found.append(token if not text or "\ufffd" in text else text)
    return found


def attention_of(module: nn.Module) -> str:
    """The variant of a layer, or "stock"."""
    return module.synthesizer.config.variant if isinstance(module, SynthesizerMixin) else STOCK


def tokenizer_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The given tokenizer, or the one beside the checkpoint that the model was loaded from.

    Raises:
        InvalidConfigError: where there is none.
    """
    if tokenizer is not None:
        return tokenizer
    model = model_in(model)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfigError(
            f"No tokenizer was given, and none is found beside the model ({model.name_or_path!r}): pass tokenizer=…."
        ) from error
