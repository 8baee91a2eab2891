"""What heads cost at a length: numbers in a decoder's cache, and multiply-adds of their logits and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from . import build_synthesizer
from .base import Synthesizer
from .config import SynthesizerConfig
from .options import LARGEST, is_positive_int, require
from .registry import get_variant

STOCK_HEAD = SynthesizerConfig("dot_product")


@dataclass(frozen=True)
class HeadShape:
    """What the costs of a head depend on beside its configuration.

    Attributes:
        hidden_size: the width d of the hidden states.
        head_dim: the width d_h of a head, and of its values.
        sharing: how many neighbouring heads share a key and a value.
        causal: whether a query sees the past alone. Only such a layer has a cache.
        window: how many places the stock layer itself looks back; None for all.
        max_length: the longest sequence that the model names; None if it names none.
    """

    hidden_size: int
    head_dim: int
    sharing: int = 1
    causal: bool = False
    window: int | None = None
    max_length: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadShape:
        """The inverse of `dataclasses.asdict`.

        Raises:
            InvalidConfigError: for anything else.
        """
        shape = cls(**data)
        for name in ("hidden_size", "head_dim", "sharing"):
            value = getattr(shape, name)
            require(is_positive_int(value) and value <= LARGEST, name, value, "a positive int")
        for name in ("window", "max_length"):
            value = getattr(shape, name)
            require(value is None or is_positive_int(value), name, value, "a positive int or None")
        require(isinstance(shape.causal, bool), "causal", shape.causal, "True or False")
        return shape


def kept_tokens(config: SynthesizerConfig, shape: HeadShape, length: int) -> int:
    """Of how many of `length` tokens a cache must keep something for a head.

    With a window: `window + sinks`. Logits by distance alone: D + `sinks`, and one sum that stands for all other tokens. Else all
    tokens that the stock layer sees.
    """
    kept = min(length, shape.window or length)
    if not shape.causal:
        return 0
    window = config.options.get("window")
    if window is not None:
        return min(kept, window + config.sinks)
    return min(kept, config.max_distance + config.sinks + 1) if _sums_distant_keys(config) else kept


def cached_numbers(configs: Sequence[SynthesizerConfig], shape: HeadShape, length: int) -> int:
    """The numbers that a cache keeps of `length` tokens for heads that share a key and a value; times the size of a dtype: bytes.

    The shared value is kept as long as one of the heads needs it, and so is the shared key. Key states of a synthesizer are each
    head's own.
    """
    kept = [kept_tokens(config, shape, length) for config in configs]
    values, keys = (
        max(kept),
        max((count for count, config in zip(kept, configs, strict=True) if _compares(config)), default=0),
    )
    key_widths = sum(
        count * _own_key_width(config, shape, length) for count, config in zip(kept, configs, strict=True)
    )
    return (values + keys) * shape.head_dim + key_widths


def multiply_adds(config: SynthesizerConfig, shape: HeadShape, length: int) -> int:
    """The multiply-adds of one head for one sequence: its logits with their projections, and weights times values.

    Pairs of a query and a key count where the query sees the key. Distant keys of logits by distance count as running sums. A
    variant that chooses its keys counts as one that sees all.
    """
    head, pairs = _one_head(config, shape, length), visible_pairs(config, shape, length)
    shared = shape.hidden_size * shape.head_dim * (shape.sharing - 1) // shape.sharing if _compares(config) else 0
    return length * (head.token_products - shared) + pairs * (head.logit_width + shape.head_dim)


def visible_pairs(config: SynthesizerConfig, shape: HeadShape, length: int) -> int:
    """The number of pairs of a query and a key that it sees, in one sequence."""
    near, sinks = min(length, shape.window or length), 0
    window, sums = config.options.get("window"), 0
    if window is not None:
        near, sinks = min(near, window), config.sinks
    elif _sums_distant_keys(config) and config.max_distance < near:
        near, sinks = config.max_distance, config.sinks
        sums = 2 * length * (1 if shape.causal else 2)  # a running sum of values, and its weight
    behind = _sum_of_minima(length, near) + _sum_of_minima(length - near, sinks)
    return behind + sums + (0 if shape.causal else _sum_of_minima(length - 1, near - 1))


def _sum_of_minima(count: int, most: int) -> int:
    """Σ min(t, most) for t = 1 … count."""
    small = max(0, min(count, most))
    return small * (small + 1) // 2 + max(0, count - small) * most


def _compares(config: SynthesizerConfig) -> bool:
    """Whether the stock keys are needed."""
    return any(get_variant(part).is_stock for part in config.parts)


def _sums_distant_keys(config: SynthesizerConfig) -> bool:
    """Whether the logits of distant keys differ by their key alone, so that running sums stand for them."""
    if config.options.get("window") is not None or not config.has_distances:
        return False
    parts = [get_variant(part) for part in config.parts]
    return all("max_distance" in part.options or part.key_side for part in parts)


def _own_key_width(config: SynthesizerConfig, shape: HeadShape, length: int) -> int:
    """The width of a head's key states without the stock key."""
    head = _one_head(config, shape, length)
    return sum(part.key_width for _, part in head.components() if not part.is_stock)


@lru_cache(maxsize=256)
def _one_head(config: SynthesizerConfig, shape: HeadShape, length: int) -> Synthesizer:
    """A synthesizer of one head, without weights."""
    with torch.device("meta"):
        head = build_synthesizer(config.replace(heads=None), shape.hidden_size, 1, length, head_dim=shape.head_dim)
    head.set_causal(shape.causal)
    return head
