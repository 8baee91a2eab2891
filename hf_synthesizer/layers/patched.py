"""Whether a model is patched, and which of its layers are."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .mixin import SynthesizerMixin


def synthesized_layers(model: nn.Module) -> Iterator[tuple[str, SynthesizerMixin]]:
    """The patched layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SynthesizerMixin))


def is_patched(model: nn.Module) -> bool:
    """Whether a model, or a part of one, holds a synthesized layer."""
    return any(True for _ in synthesized_layers(model))
