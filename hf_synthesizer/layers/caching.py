"""What a layer keeps of the tokens before it, in the caches that Transformers makes.

Layers whose logits look at no other token have values alone to keep. A key of width 1 stands in, because Transformers
reads a cache's length off its keys. Where the room for keys is wider than what a layer has to say of a key (a quantized
cache works on groups of numbers; a static one may have been laid out before the first token), zeros fill it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    EncoderDecoderCache,
    QuantizedLayer,
    StaticLayer,
)

from ..device.tracing import traced
from ..errors import UnsupportedModelError

# Keywords that reach a layer and that some attention function of Transformers reads. Any other is for the layers around.
_READ = frozenset(
    [
        "alibi",
        "attention_bias",
        "block_table",
        "dropout",
        "head_mask",
        "layer_head_mask",
        "position_bias",
        "read_index",
        "s_aux",
        "scaling",
        "softcap",
        "write_index",
    ]
)
_FILLED = "_synthesizer_filled"
"""Set on a layer's cache whose keys this module widened, so that its keys are known to be ours."""


def require_known_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for a keyword argument by which the stock layer would compute something else.

    Args:
        arguments: what the layer's `forward` was given beyond what its layer class has an answer to. None is no argument.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if _is_cache(name, value):
            raise UnsupportedModelError(
                f"A {type(value).__name__} was passed as {name!r}. Synthesized layers keep their tokens in a Cache of "
                f"Transformers under the name past_key_values, and know no paged ones: generate_batch and continuous "
                f"batching do not work with them. Call model.generate() on padded batches instead."
            )
        if name in _READ:
            raise UnsupportedModelError(
                f"The argument {name}={_shown(value)} changes attention in a way that synthesized layers do not know. Leave "
                f"it out, or leave the layers that need it stock (layers=…)."
            )


def _is_cache(name: str, value: Any) -> bool:
    if isinstance(value, (bool, torch.Tensor)):  # use_cache and cache_position
        return False
    words = name.lower().split("_")
    return isinstance(value, Cache) or "cache" in words or name.startswith("past_key")


def extend(
    past_key_values: Cache | None,
    layer_idx: int,
    key_states: torch.Tensor | None,
    value: torch.Tensor,
    positions_known: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, int | torch.Tensor]:
    """Add the new tokens to the cache: key states and values of all tokens, and how many indices lie before the new ones.

    Args:
        past_key_values: the cache, if there is one; that of an encoder-decoder is asked for its decoder's.
        layer_idx: the layer's place in it.
        key_states: (B, H, L, w), what the logits need to know of the new keys; None if that is nothing.
        value: (B, G, L, d_v) of the new keys, for G ≤ H groups of heads.
        positions_known: whether `position_ids` say where tokens stand. If they do not, indices are counted, and a cache that
            drops what lies behind a window is refused once it does.

    A static cache gives its whole buffer, whose indices behind the last token are empty.

    Raises:
        UnsupportedModelError: for a cache of an unknown kind, or one that holds keys of something else.
    """
    if past_key_values is None:
        return key_states, value, 0
    before, length = past_length(past_key_values, layer_idx), value.shape[-2]
    cache = self_attention_cache(past_key_values)
    if key_states is None:
        _, value = store(cache, layer_idx, value.new_zeros(*value.shape[:-1], 1), value)
        everything = None
    else:
        heads, width = key_states.shape[1], key_states.shape[-1]
        stored, value = store(cache, layer_idx, grouped(key_states, value.shape[1]), value)
        everything = ungrouped(stored, heads, width)
    return everything, value, tokens_before(before, length, value.shape[-2], positions_known)


def tokens_before(
    before: int | torch.Tensor, length: int, key_length: int, positions_known: bool
) -> int | torch.Tensor:
    """How many of `key_length` indices lie before the last `length` tokens, `before` of which had been seen.

    Raises:
        UnsupportedModelError: when indices were dropped, and nothing else says where tokens stand.
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
    """`cache.update`, with zeros behind the keys where the cache's are wider.

    Raises:
        UnsupportedModelError: where they are narrower, or hold something else than this layer's.
    """
    room, width = _room(cache, layer_idx), keys.shape[-1]
    wide = _width(room, keys, value)
    if wide != width:
        _require_own(room, wide, width, cache.get_seq_length(layer_idx))
        keys = nn.functional.pad(keys, (0, wide - width))
        setattr(room, _FILLED, True)
    keys, value = cache.update(keys, value, layer_idx, *args, **kwargs)
    return keys[..., :width], value


def grouped(key_states: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, L, w) → (B, G, L, ⌈H·w / G⌉): as many heads as the values have, which a static cache asks for.

    All that is kept of a token lies side by side, and is cut into equal parts; zeros fill the last one.
    """
    if key_states.shape[1] == groups:
        return key_states
    flat = key_states.transpose(1, 2).flatten(2)  # (B, L, H·w)
    missing = -flat.shape[-1] % groups
    if missing:
        flat = nn.functional.pad(flat, (0, missing))
    return flat.unflatten(-1, (groups, -1)).transpose(1, 2)


def ungrouped(stored: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """The inverse of `grouped`: (B, H, L, w)."""
    if stored.shape[1] == heads:
        return stored
    flat = stored.transpose(1, 2).flatten(2)[..., : heads * width]
    return flat.unflatten(-1, (heads, width)).transpose(1, 2)


def past_length(past_key_values: Any, layer_idx: int) -> int | torch.Tensor:
    """How many tokens a layer has seen before its cache is updated.

    Raises:
        UnsupportedModelError: for a cache of a kind that is not known to keep tokens in their order.
    """
    cache = self_attention_cache(past_key_values)
    _room(cache, layer_idx)
    length = cache.get_seq_length(layer_idx)
    return length.clone() if isinstance(length, torch.Tensor) else length  # a static cache counts on in place


def dropped_tokens(past_key_values: Any, layer_idx: int, key_length: int) -> int:
    """How many of the tokens that a layer has seen its cache has no longer, behind a sliding window."""
    if past_key_values is None:
        return 0
    seen = past_length(past_key_values, layer_idx)
    return 0 if isinstance(seen, torch.Tensor) else max(0, seen - key_length)


def self_attention_cache(past_key_values: Any) -> Any:
    """Of a cache for two kinds of attention, the one for this kind."""
    return (
        past_key_values.self_attention_cache if isinstance(past_key_values, EncoderDecoderCache) else past_key_values
    )


def _room(cache: Any, layer_idx: int) -> Any:
    """What the cache has for one layer, None before the first token.

    Raises:
        UnsupportedModelError: for a cache of a kind that is not known to keep tokens in their order.
    """
    layers = getattr(cache, "layers", None)
    made: Any = None
    if isinstance(cache, Cache) and isinstance(layers, list):
        made = layers[layer_idx] if layer_idx < len(layers) else None
        kind: Any = type(made) if made is not None else cache.layer_class_to_replicate
        # A model's own kinds of layers may keep something else than tokens.
        known = kind is not None and issubclass(kind, (DynamicLayer, StaticLayer))
        if known and (kind.__module__ == Cache.__module__ or issubclass(kind, QuantizedLayer)):
            return made
    found = type(cache).__name__ if made is None else f"{type(cache).__name__} of {type(made).__name__}"
    raise UnsupportedModelError(
        f"Synthesized layers know the caches of Transformers that keep tokens in their order (DynamicCache, StaticCache, "
        f"QuantizedCache, and an EncoderDecoderCache of these), not a {found}. Pass one of them as past_key_values, or "
        f"none, and generate() makes one."
    )


def _width(room: Any, stored: torch.Tensor, value: torch.Tensor) -> int:
    """How wide keys are in a layer's cache."""
    if isinstance(room, QuantizedLayer):
        return max(stored.shape[-1], value.shape[-1])
    keys = getattr(room, "keys", None)
    return keys.shape[-1] if isinstance(keys, torch.Tensor) and keys.dim() == stored.dim() else stored.shape[-1]


def _require_own(room: Any, wide: int, width: int, past_length: int | torch.Tensor) -> None:
    """Raise `UnsupportedModelError` unless keys of `width` fit into the room, and what is there already is ours."""
    if getattr(room, _FILLED, False):
        return
    empty = room is None or (traced() if isinstance(past_length, torch.Tensor) else False) or not bool(past_length)
    if not empty:
        raise UnsupportedModelError(
            f"past_key_values hold tokens whose keys are {wide} wide, while this layer keeps {width} of each: they were "
            f"made by something else, such as prefix tuning or another model. Only a layer that compares tokens has "
            f"logits for keys that are given to it: dot_product, its mixtures without salience, and the variants that "
            f"choose keys. Patch with one of these, leave the layer stock, or adapt the model by other means "
            f"(hf_synthesizer.peft.lora_config_for)."
        )
    if wide < width:
        raise UnsupportedModelError(
            f"The static cache was laid out for keys of width {wide}, but this layer keeps {width} numbers of each key. "
            f"Let it lay itself out: make it without early_initialization(), or call generate() without "
            f"prefill_chunk_size."
        )


def _shown(value: Any) -> str:
    return f"<Tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)
