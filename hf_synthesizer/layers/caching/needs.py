"""Which earlier tokens the heads of a layer need: all of them, or the nearest and the first of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...synthesizers import HeadGroups, Synthesizer
from ...synthesizers.registry import get_variant
from ...synthesizers.relative import DistanceSynthesizer


@dataclass(frozen=True)
class Need:
    """What some heads need of earlier tokens.

    Attributes:
        heads: numbers of heads of the layer.
        near: a query needs the `near` last tokens, itself included; None for all tokens.
        sinks: the number of first tokens of a row that it needs besides.
        merges: whether all other tokens have logits that differ by their key alone, so that one pseudo-token can stand for them.
        synthesizer: of these heads.
    """

    heads: tuple[int, ...]
    near: int | None
    sinks: int
    merges: bool = False
    synthesizer: Any = field(default=None, compare=False, repr=False)

    def without_synthesizer(self) -> Need:
        """The same need, as plain data that a cache can hold."""
        return Need(self.heads, self.near, self.sinks, self.merges)


def needs_of(synthesizer: Synthesizer, merges: bool) -> list[Need]:
    """What each group of heads needs. `merges` says whether tokens may be merged."""
    if isinstance(synthesizer, HeadGroups):
        return [_need(group, heads, merges) for _, heads, group in synthesizer.members()]
    return [_need(synthesizer, tuple(range(synthesizer.num_heads)), merges)]


def _need(synthesizer: Synthesizer, heads: tuple[int, ...], merges: bool) -> Need:
    config = synthesizer.config
    window = config.options.get("window")
    if window is not None:
        return Need(heads, window, config.sinks, synthesizer=synthesizer)
    if merges and synthesizer.causal and _knows_distance_alone(synthesizer):
        return Need(heads, config.max_distance, config.sinks, True, synthesizer)
    return Need(heads, None, 0, synthesizer=synthesizer)


def _knows_distance_alone(synthesizer: Synthesizer) -> bool:
    """Whether logits of keys beyond `max_distance` differ by a number of each key, the same for all queries."""
    parts = [get_variant(part) for part in synthesizer.config.parts]
    by_distance = [issubclass(part, DistanceSynthesizer) for part in parts]
    return any(by_distance) and all(known or part.key_side for known, part in zip(by_distance, parts, strict=True))
