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


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer, (B, H, L, L), float32 on the CPU. `attention` is its variant, or "stock"."""

    label: str
    attention: str
    weights: torch.Tensor


def record(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[LayerWeights]:
    """Run a model once under eager attention, without dropout, and return the weights of its self-attention layers.

    The model is left as it was. The decoder of an encoder-decoder without decoder inputs reads the encoder's input.

    Raises:
        UnsupportedModelError: for a model whose self-attention returns no weights.
    """
    model, batch = model_in(model), dict(inputs)
    if model.config.is_encoder_decoder and not {"decoder_input_ids", "labels"} & batch.keys():
        batch["decoder_input_ids"] = batch["input_ids"]
    attention_layers, _ = find_attention_layers(model)
    weights_by_label: dict[str, torch.Tensor] = {}

    def watch(label: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weights = output[-1] if isinstance(output, tuple) else None
            if isinstance(weights, torch.Tensor) and weights.dim() == 4:
                weights_by_label[label] = weights.detach().float().cpu()

        return hook

    with contextlib.ExitStack() as stack:
        stack.enter_context(observing(model, backend="eager"))
        for attention_layer in attention_layers:
            stack.callback(attention_layer.module.register_forward_hook(watch(attention_layer.label)).remove)
        with torch.no_grad():
            model(**on_device(batch, model))
    if not weights_by_label:
        raise UnsupportedModelError(
            f"No self-attention layer of {type(model).__name__} returns weights, so there is nothing to show."
        )
    variants = {
        layer.label: layer.module.synthesizer.config.variant if isinstance(layer.module, SynthesizerMixin) else "stock"
        for layer in attention_layers
    }
    return [
        LayerWeights(label, variant, weights_by_label[label])
        for label, variant in variants.items()
        if label in weights_by_label
    ]


def tokens_read(model: PreTrainedModel, inputs: Mapping[str, Any], stack: str, row: int = 0) -> list[tuple[int, int]]:
    """The positions and ids of the tokens that a stack of a model reads in a row of a batch, without padding."""
    model = model_in(model)
    name, mask = "input_ids", inputs.get("attention_mask")
    if model.config.is_encoder_decoder and stack == "decoder" and {"decoder_input_ids", "labels"} & inputs.keys():
        name, mask = "decoder_input_ids", inputs.get("decoder_attention_mask")
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    tokens = inputs[name][row] if name in inputs else shift(labels=inputs["labels"])[row]
    keep = [True] * len(tokens) if mask is None else mask[row].bool().tolist()
    return [(place, token) for place, (token, kept) in enumerate(zip(tokens.tolist(), keep, strict=True)) if kept]


def words_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The texts of tokens, without the marks that byte pairs and sentence pieces use for a space."""
    words = []
    for token in map(str, tokenizer.convert_ids_to_tokens(ids)):
        text = tokenizer.convert_tokens_to_string([token]).strip()
        words.append(token if not text or "\ufffd" in text else text)
    return words


def load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside the checkpoint of a model.

    Raises:
        InvalidConfigError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfigError(
            f"There is no tokenizer beside the model ({model.name_or_path!r}): pass tokenizer=…."
        ) from error
