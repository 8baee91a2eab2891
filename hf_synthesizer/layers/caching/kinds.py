"""The kinds of caches that synthesized layers know. Another kind is one more entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, QuantizedLayer, StaticLayer

from ...errors import UnsupportedModelError
from .kept import KeptLayer


@dataclass(frozen=True)
class CacheKind:
    """One kind of a layer's cache. It must keep tokens in their order.

    Attributes:
        layer_class: the class of Transformers that holds the keys and values of one layer.
        key_width: of such an object (None before the first token), keys and values: how wide the keys must be that it takes.
        with_subclasses: whether subclasses from outside Transformers' own file are known too. Those of a model may keep
            something else than tokens.
    """

    layer_class: type
    key_width: Callable[[Any, torch.Tensor, torch.Tensor], int]
    with_subclasses: bool = False

    def includes(self, layer_class: type) -> bool:
        known = self.with_subclasses or layer_class.__module__ == Cache.__module__
        return known and issubclass(layer_class, self.layer_class)


def _width_of_kept_keys(layer_cache: Any, keys: torch.Tensor, value: torch.Tensor) -> int:
    kept = getattr(layer_cache, "keys", None)
    return kept.shape[-1] if isinstance(kept, torch.Tensor) and kept.dim() == keys.dim() else keys.shape[-1]


def _width_of_groups(layer_cache: Any, keys: torch.Tensor, value: torch.Tensor) -> int:
    """Quantizers work on groups of numbers: a key must be as wide as a value."""
    return max(keys.shape[-1], value.shape[-1])


KINDS = (
    CacheKind(QuantizedLayer, _width_of_groups, with_subclasses=True),
    CacheKind(KeptLayer, _width_of_kept_keys, with_subclasses=True),
    CacheKind(DynamicLayer, _width_of_kept_keys),
    CacheKind(StaticLayer, _width_of_kept_keys),
)
"""The first entry that includes a class is its kind."""


def find_layer_cache(cache: Any, layer_idx: int) -> tuple[Any, CacheKind]:
    """The part of a cache for one layer (None before the first token), and its kind.

    Raises:
        UnsupportedModelError: for a cache of an unknown kind.
    """
    layers, layer_cache = getattr(cache, "layers", None), None
    if isinstance(cache, Cache) and isinstance(layers, list):
        layer_cache = layers[layer_idx] if layer_idx < len(layers) else None
        layer_class = cache.layer_class_to_replicate if layer_cache is None else type(layer_cache)
        for kind in KINDS:
            if layer_class is not None and kind.includes(layer_class):
                return layer_cache, kind
    name = type(cache).__name__ + ("" if layer_cache is None else f" of {type(layer_cache).__name__}")
    raise UnsupportedModelError(
        f"Synthesized layers know the caches of Transformers that keep tokens in their order (DynamicCache, StaticCache, "
        f"QuantizedCache, and an EncoderDecoderCache of these), not a {name}. Pass one of them as past_key_values, or "
        f"none, and generate() makes one."
    )


def self_attention_cache(past_key_values: Any) -> Any:
    """The cache for self-attention in a cache for two kinds of attention."""
    return (
        past_key_values.self_attention_cache if isinstance(past_key_values, EncoderDecoderCache) else past_key_values
    )
