"""Compute once what does not change any more: the attention weights of static layers, for inference."""

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
    """What became of one layer. `rank` is None where the whole matrix is kept; `error` is the largest row sum of
    |weights − compressed weights|, so that no output is off by more than `error` times the largest value."""

    name: str
    what: str
    rank: int | None
    error: float


@dataclass(frozen=True)
class FuseReport:
    """Every synthesized layer of a model, fused or left. Prints as a table."""

    layers: tuple[FusedLayer, ...]

    def __str__(self) -> str:
        rows = [("layer", "fused", "rank", "error")]
        rows += [(x.name, x.what, "" if x.rank is None else str(x.rank), f"{x.error:.1e}") for x in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def fuse_for_inference(model: nn.Module, *, tolerance: float | None = None) -> FuseReport:
    """Compute the static part of every synthesized layer once, in place. `unfuse(model)` undoes it.

    Layers whose logits do not depend on the input (`random`, `fixed_random`, `factorized_random`, and these with
    `salience`) keep their softmaxed weights; in other mixtures the static parts become one table of logits. So they do where
    the weights would not be exact, because a row's logits lie more than 60 apart or in float16; the report says so.

    What was computed cannot become stale: the parameters behind it are out of reach until `unfuse`. `state_dict`, saving,
    copies and `.to()` work as before, and `load_state_dict` computes everything again.

    Args:
        model: a patched model, or any module that holds `SynthesizerAttention` layers, in eval mode.
        tolerance: if given, a matrix of weights is kept as two thin factors where that changes no row by more than
            `tolerance` in sum, so that no output moves by more than `tolerance` times the largest value, as long as no key is
            hidden. The cost of such a layer grows with L, not L². Causal layers are never compressed: a triangle has
            full rank.

    Raises:
        InvalidConfigError: for a tolerance that is no number, or negative.
        FusedModelError: in train mode, when offloaded, when fused already, or when there is nothing to fuse.
    """
    if tolerance is not None and not (_is_number(tolerance) and isfinite(tolerance) and tolerance >= 0):
        raise InvalidConfigError(
            f"tolerance must be a number of at least 0, or None for exact weights, not {tolerance!r}."
        )
    if model.training:
        raise FusedModelError("fuse_for_inference is for inference: call model.eval() first.")
    require_in_memory(model, f"This {type(model).__name__} cannot be fused", FusedModelError)
    found = list(_places(model))
    if any(isinstance(place.synthesizer, FusedSynthesizer) for place in found):
        raise FusedModelError("This model is fused already. Call unfuse(model) first to fuse it anew.")
    layers, made = [], []
    for place in found:
        synthesizer, name = place.synthesizer, place.name
        with torch.no_grad():
            static = synthesizer.static_table() is not None
        if not static:
            layers.append(FusedLayer(name, f"nothing: {synthesizer.config.variant} depends on the input", None, 0.0))
            continue
        fused = FusedSynthesizer(synthesizer, place.causal, tolerance)
        made.append((place, fused))
        layers.append(FusedLayer(name, fused.what, fused.rank, fused.error))
    if not made:
        raise FusedModelError(
            f"Nothing to fuse: none of the {len(found)} synthesized layers of this {type(model).__name__} has a part that "
            f"is the same for every input (random, fixed_random, factorized_random)."
        )
    for place, fused in made:
        fused.take_over()
        place.holder._modules[place.key] = fused
    return FuseReport(tuple(layers))


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse_for_inference`, in place; returns the same model."""
    for place in list(_places(model)):
        if isinstance(place.synthesizer, FusedSynthesizer):
            place.holder._modules[place.key] = place.synthesizer.give_back()
    return model


@dataclass(frozen=True)
class _Place:
    """Where a synthesizer is: the layer's or the group's name, the module that holds it, and under which key."""

    name: str
    holder: nn.Module
    key: str
    causal: bool

    @property
    def synthesizer(self) -> Synthesizer:
        return cast(Synthesizer, self.holder._modules[self.key])


def _places(model: nn.Module) -> Iterator[_Place]:
    """Each layer's synthesizer, or those of its groups of heads."""
    for name, module in model.named_modules():
        synthesizer = getattr(module, "synthesizer", None)
        causal = bool(getattr(module, "is_causal", False))
        if isinstance(synthesizer, HeadGroups):
            for key, heads, _ in synthesizer.members():
                yield _Place(f"{name} [{ranges(heads)}]", synthesizer.groups, key, causal)
        elif isinstance(synthesizer, Synthesizer):
            yield _Place(name, module, "synthesizer", causal)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
