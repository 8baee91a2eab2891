"""Whether a model is patched, and which of its layers are synthesized."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from .finding.stock_classes import CLASSES
from .mixin import SynthesizerMixin

TAGS = ("synthesizer", "hf_synthesizer")
"""The tags of patched models on the Hub. Trainer writes a model's tags into its card."""


def synthesized_layers(model: nn.Module) -> Iterator[tuple[str, SynthesizerMixin]]:
    """The synthesized layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SynthesizerMixin))


def is_patched(model: nn.Module) -> bool:
    """Whether a model, or a part of one, holds a synthesized layer."""
    return any(isinstance(module, SynthesizerMixin) for module in model.modules())


def is_patched_class(cls: type) -> bool:
    """Whether a class is a `SynthesizerXxx` of ours, or a subclass of one that a wrapper made (FSDP2)."""
    return any(base.__module__ == CLASSES for base in cls.__mro__)


def patched_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The `SynthesizerXxx` class of a patched model, even if a wrapper made a subclass (FSDP2)."""
    return next(cls for cls in type(model).__mro__ if cls.__module__ == CLASSES and "config_class" in vars(cls))


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that a patched model had before."""
    return patched_class(model).__bases__[1]
