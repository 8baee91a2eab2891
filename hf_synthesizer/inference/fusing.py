"""`fuse_for_inference`: compute the attention weights of static layers once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import cast

import torch
from torch import nn

from ..device.offloading import require_in_memory
from ..errors import FusedModelError, InvalidConfigError
from ..synthesizers import HeadGroups, Synthesizer
from ..synthesizers.config import ranges
from .fused import FusedSynthesizer


@dataclass(frozen=True)
class FusedLayer:
    """What `fuse_for_inference` did with one layer. `rank` is None if the whole matrix is kept. `error` is the largest row sum of
    |weights − compressed weights|: no output changes by more than `error` times the largest value."""

    name: str
    what: str
    rank: int | None
    error: float


@dataclass(frozen=True)
class FuseReport:
    """All synthesized layers of a model, fused or not. Prints as a table."""

    layers: tuple[FusedLayer, ...]

    def __str__(self) -> str:
        rows = [("layer", "fused", "rank", "error")]
        rows += [(x.name, x.what, "" if x.rank is None else str(x.rank), f"{x.error:.1e}") for x in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def fuse_for_inference(model: nn.Module, *, tolerance: float | None = None) -> FuseReport:
    """Compute the static part of every synthesized layer once, in place. `unfuse(model)` undoes it.

    Layers whose logits do not depend on the input (`random`, `fixed_random`, `factorized_random`, and these with
    `salience`) keep their softmaxed weights. In other mixtures, the static parts become one table of logits. A layer also keeps
    logits where weights would not be exact: in float16, with a window, or if the logits of a row span more than 60. The report says
    so.

    The fused weights cannot become stale: the parameters behind them are read-only until `unfuse`. `state_dict`, saving,
    copies and `.to()` work as before, and `load_state_dict` computes the weights again.

    Args:
        model: a patched model, or any module that holds `SynthesizerAttention` layers, in eval mode.
        tolerance: None keeps exact weights. With a number, weights become two thin factors if the absolute error of each row
            sums to at most `tolerance`. Without masked keys, no output then changes by more than `tolerance` times the largest
            value. The cost of such a layer grows with L, not L². Causal layers are never compressed: a triangle has full rank.

    Raises:
        InvalidConfigError: for a tolerance that is negative or no number.
        FusedModelError: in train mode, when offloaded, when fused already, or without a static layer.
    """
    if tolerance is not None and not (_is_number(tolerance) and isfinite(tolerance) and tolerance >= 0):
        raise InvalidConfigError(
            f"tolerance must be a number of at least 0, or None for exact weights, not {tolerance!r}."
        )
    if model.training:
        raise FusedModelError("fuse_for_inference is for inference: call model.eval() first.")
    require_in_memory(model, f"This {type(model).__name__} cannot be fused", FusedModelError)
    locations = list(_synthesizer_locations(model))
    if any(isinstance(location.synthesizer, FusedSynthesizer) for location in locations):
        raise FusedModelError("This model is fused already. Call unfuse(model) first to fuse it anew.")
    layers, replacements = [], []
    for location in locations:
        synthesizer, name = location.synthesizer, location.name
        with torch.no_grad():
            static = synthesizer.static_table() is not None
        if not static:
            layers.append(FusedLayer(name, f"nothing: {synthesizer.config.variant} depends on the input", None, 0.0))
            continue
        fused = FusedSynthesizer(synthesizer, location.causal, tolerance)
        replacements.append((location, fused))
        layers.append(FusedLayer(name, fused.what, fused.rank, fused.error))
    if not replacements:
        raise FusedModelError(
            f"Nothing to fuse: none of the {len(locations)} synthesized layers of this {type(model).__name__} has a part that "
            f"is the same for every input (random, fixed_random, factorized_random)."
        )
    for location, fused in replacements:
        fused.empty_original()
        location.holder._modules[location.key] = fused
    return FuseReport(tuple(layers))


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse_for_inference`, in place; returns the same model."""
    for location in list(_synthesizer_locations(model)):
        if isinstance(location.synthesizer, FusedSynthesizer):
            location.holder._modules[location.key] = location.synthesizer.restore_original()
    return model


@dataclass(frozen=True)
class _SynthesizerLocation:
    """Where a synthesizer is: the name of its layer or group, the module that holds it, and its key there."""

    name: str
    holder: nn.Module
    key: str
    causal: bool

    @property
    def synthesizer(self) -> Synthesizer:
        return cast(Synthesizer, self.holder._modules[self.key])


def _synthesizer_locations(model: nn.Module) -> Iterator[_SynthesizerLocation]:
    """Yield the synthesizer of each layer, or those of its groups of heads."""
    for name, module in model.named_modules():
        synthesizer = getattr(module, "synthesizer", None)
        causal = bool(getattr(module, "is_causal", False))
        if isinstance(synthesizer, HeadGroups):
            for key, heads, _ in synthesizer.members():
                yield _SynthesizerLocation(f"{name} [{ranges(heads)}]", synthesizer.groups, key, causal)
        elif isinstance(synthesizer, Synthesizer):
            yield _SynthesizerLocation(name, module, "synthesizer", causal)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
