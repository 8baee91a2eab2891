"""Stores values and key states in the caches of Transformers.

Layers whose logits depend on no other token store only values, with keys of width 1: Transformers reads a cache's length from
its keys. If the cache's keys are wider than the key states, zeros fill them. (A quantized cache works on groups of numbers; a
static cache may have been laid out before the first token.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ...device.tracing import traced
from ...errors import UnsupportedModelError
from .kinds import find_layer_cache, self_attention_cache

_FILLED = "_synthesizer_filled"
"""An attribute of a layer's cache whose keys `store` has filled with zeros: these keys are ours."""


def extend(
    past_key_values: Cache | None,
    layer_idx: int,
    key_states: torch.Tensor | None,
    value: torch.Tensor,
    positions_known: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, int | torch.Tensor]:
    """Add the new tokens to the cache: key states and values of all tokens, and the number of indices before the new ones.

    Args:
        past_key_values: the cache, if there is one. That of an encoder-decoder holds one for its decoder.
        layer_idx: the layer's index in the cache.
        key_states: (B, H, L, w), what the logits need from the new keys; None if they need nothing.
        value: (B, G, L, d_v) of the new keys, for G ≤ H groups of heads.
        positions_known: whether `position_ids` give the positions. If not, indices are counted, and a cache that drops tokens
            behind a window is refused when it drops the first.

    A static cache returns its whole buffer. Its indices behind the last token are empty.

    Raises:
        UnsupportedModelError: for a cache of an unknown kind, or with keys of something else.
    """
    if past_key_values is None:
        return key_states, value, 0
    before, length = past_length(past_key_values, layer_idx), value.shape[-2]
    cache = self_attention_cache(past_key_values)
    if key_states is None:
        _, value = store(cache, layer_idx, value.new_zeros(*value.shape[:-1], 1), value)
    else:
        heads, width = key_states.shape[1], key_states.shape[-1]
        keys, value = store(cache, layer_idx, grouped(key_states, value.shape[1]), value)
        key_states = ungrouped(keys, heads, width)
    return key_states, value, tokens_before(before, length, value.shape[-2], positions_known)


def tokens_before(
    before: int | torch.Tensor, length: int, key_length: int, positions_known: bool
) -> int | torch.Tensor:
    """How many of `key_length` indices are before the last `length` tokens, if the layer has seen `before` tokens.

    Raises:
        UnsupportedModelError: if the cache has dropped tokens, and no `position_ids` give the positions.
    """
    if isinstance(before, torch.Tensor) or before + length <= key_length:
        return before
    if not positions_known:
        raise UnsupportedModelError(
            f"The cache keeps {key_length} of {before + length} tokens (a sliding window), but this layer counts its cache to "
            f"know where a token stands: it gets no position_ids. Pass a DynamicCache or StaticCache that keeps every token."
        )
    return key_length - length


def store(
    cache: Any, layer_idx: int, keys: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update`, with zeros behind the keys if the cache's keys are wider.

    Raises:
        UnsupportedModelError: if they are narrower, or not of this layer.
    """
    layer_cache, kind = find_layer_cache(cache, layer_idx)
    width, cached_width = keys.shape[-1], kind.key_width(layer_cache, keys, value)
    if cached_width != width:
        _require_own_keys(layer_cache, cached_width, width, cache.get_seq_length(layer_idx))
        keys = nn.functional.pad(keys, (0, cached_width - width))
        setattr(layer_cache, _FILLED, True)
    keys, value = cache.update(keys, value, layer_idx, *args, **kwargs)
    return keys[..., :width], value


def grouped(key_states: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, L, w) → (B, G, L, ⌈H·w / G⌉): as many heads as the values have, which a static cache requires.

    The numbers of each token are put side by side and cut into equal parts. Zeros fill the last part.
    """
    if key_states.shape[1] == groups:
        return key_states
    flat = key_states.transpose(1, 2).flatten(2)  # (B, L, H·w)
    missing = -flat.shape[-1] % groups
    if missing:
        flat = nn.functional.pad(flat, (0, missing))
    return flat.unflatten(-1, (groups, -1)).transpose(1, 2)


def ungrouped(keys: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """The inverse of `grouped`: (B, H, L, w)."""
    if keys.shape[1] == heads:
        return keys
    flat = keys.transpose(1, 2).flatten(2)[..., : heads * width]
    return flat.unflatten(-1, (heads, width)).transpose(1, 2)


def past_length(past_key_values: Any, layer_idx: int) -> int | torch.Tensor:
    """How many tokens a layer has seen before its cache is updated.

    Raises:
        UnsupportedModelError: for a cache of an unknown kind.
    """
    cache = self_attention_cache(past_key_values)
    find_layer_cache(cache, layer_idx)
    length = cache.get_seq_length(layer_idx)
    return length.clone() if isinstance(length, torch.Tensor) else length  # a static cache counts in place


def dropped_tokens(past_key_values: Any, layer_idx: int, key_length: int) -> int:
    """How many of the tokens that a layer has seen its cache has dropped behind a sliding window."""
    if past_key_values is None:
        return 0
    seen = past_length(past_key_values, layer_idx)
    return 0 if isinstance(seen, torch.Tensor) else max(0, seen - key_length)


def _require_own_keys(layer_cache: Any, cached_width: int, width: int, past_length: int | torch.Tensor) -> None:
    """Raise `UnsupportedModelError` unless the cache can hold keys of `width` and the keys in it, if any, are ours."""
    if getattr(layer_cache, _FILLED, False):
        return
    empty = layer_cache is None or (isinstance(past_length, torch.Tensor) and traced()) or not bool(past_length)
    if not empty:
        raise UnsupportedModelError(
            f"past_key_values hold tokens whose keys are {cached_width} wide, while this layer keeps {width} of each: they were "
            f"made by something else, such as prefix tuning or another model. Only a layer that compares tokens has "
            f"logits for keys that are given to it: dot_product, its mixtures without salience, and the variants that "
            f"choose keys. Patch with one of these, leave the layer stock, or adapt the model by other means "
            f"(hf_synthesizer.peft.lora_config_for)."
        )
    if cached_width < width:
        raise UnsupportedModelError(
            f"The static cache was laid out for keys of width {cached_width}, but this layer keeps {width} numbers of each key. "
            f"Let it lay itself out: make it without early_initialization(), or call generate() without "
            f"prefill_chunk_size."
        )
