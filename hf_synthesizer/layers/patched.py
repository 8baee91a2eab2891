"""Whether a model is patched, which of its layers are, and how long a sequence they take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel

from .finding.attention_layers import AttentionLayer, find_attention_layers
from .finding.stock_classes import CLASSES
from .mixin import SynthesizerMixin

TAGS = ("synthesizer", "hf_synthesizer")
"""What a patched model is found by on the Hub. Trainer writes a model's tags into its card."""
READS_TEXT = re.compile("text|language|decoder|lm")
"""What models of several stacks call the one that reads text."""


def synthesized_layers(model: nn.Module) -> Iterator[tuple[str, SynthesizerMixin]]:
    """The patched layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SynthesizerMixin))


def is_patched(model: nn.Module) -> bool:
    """Whether a model, or a part of one, holds a synthesized layer."""
    return any(isinstance(module, SynthesizerMixin) for module in model.modules())


def patched_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The `SynthesizerXxx` class of a patched model; its own class may be a subclass that a wrapper made (FSDP2)."""
    return next(cls for cls in type(model).__mro__ if cls.__module__ == CLASSES and "config_class" in vars(cls))


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that a patched model had before."""
    return patched_class(model).__bases__[1]


def max_length_of(model: nn.Module) -> int | None:
    """The least max_length among the synthesized layers of a model; None where there are none."""
    return min((layer.synthesizer.max_length for _, layer in synthesized_layers(model)), default=None)


def max_text_length(model: PreTrainedModel) -> int | None:
    """The least max_length among the synthesized layers that read the model's text; None where none does.

    In an encoder-decoder the encoder reads it: a tokenizer does not truncate what the decoder writes. In a model of several
    towers the text tower reads it.
    """
    attention_layers, _ = find_attention_layers(model)
    stacks = {attention_layer.stack for attention_layer in attention_layers}
    if "encoder" in stacks:
        readers = {"encoder"}
    else:
        readers = stacks if len(stacks) == 1 else {stack for stack in stacks if READS_TEXT.search(stack)}
    return _least_max_length(layer for layer in attention_layers if layer.stack in readers)


def max_generation_length(model: PreTrainedModel) -> int | None:
    """The least max_length among the synthesized layers that generate; None where none does. It counts the prompt.

    An encoder and the tower of another modality (LLaVA's images) do not generate. Where a model has several stacks, those that see
    the past alone do.
    """
    attention_layers, _ = find_attention_layers(model)
    causal = [layer for layer in attention_layers if getattr(layer.module, "is_causal", False)]
    if model.config.is_encoder_decoder:
        causal = [layer for layer in attention_layers if layer.stack != "encoder"]
    return _least_max_length(causal or attention_layers)


def _least_max_length(attention_layers: Iterable[AttentionLayer]) -> int | None:
    modules = (layer.module for layer in attention_layers)
    return min((m.synthesizer.max_length for m in modules if isinstance(m, SynthesizerMixin)), default=None)
