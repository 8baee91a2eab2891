"""The cache of a layer that keeps the stock forward: the stock keys, and beside them the key states of the synthesizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..caching import KeptLayer, KeptStep, NewTokens, grouped, layer_that_drops, split_states, store, ungrouped

if TYPE_CHECKING:
    from .call import StockForwardCall
    from .layer import StockForwardLayer


class KeySideCache(Cache):
    """Replaces a cache during one call of a stock forward, and stores the key states with the keys.

    The stock forward updates it and gets its own keys back. The call gets the key states of all tokens, cached ones included.
    Everything else is the cache's own. It also stands for the self-attention part of an `EncoderDecoderCache`.
    """

    def __init__(self, cache: Cache, layer: StockForwardLayer, call: StockForwardCall):
        # Not Cache.__init__, which would make layers of its own.
        self.cache = cache
        self.layer = layer
        self.call = call

    def __getattr__(self, name: str) -> Any:
        if name in ("cache", "layer", "call"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.cache, name)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        return self.cache.get_seq_length(*args, **kwargs)

    @property
    def self_attention_cache(self) -> KeySideCache:
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the cache's own, with keys (B, G, L, d_h + w) for G groups of heads.

        If only some heads compare tokens, the cache keeps their keys and the key states side by side for each token, and
        the stock forward gets these keys back, (B, G' ≤ G, L, d_h).
        """
        layer = layer_that_drops(self.cache, layer_idx)
        if layer is None:
            returned = self.update_all(key_states, value_states, layer_idx, *args, **kwargs)
        else:
            returned = self.update_some(key_states, value_states, layer_idx, layer)
        self.call.returned = returned
        return returned

    def update_some(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, layer: KeptLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` of a cache that has dropped tokens. The stock forward gets placeholders of all tokens, without memory."""
        call, kept = self.call, self.layer.kept_keys
        kept_key = key if kept is None or key.shape[1] == len(kept) else key[:, kept]
        states = split_states(self.layer.synthesizer, call.key_states)
        new = NewTokens(self.layer.all_values(value, call.hidden_states), kept_key, states)
        call.step = KeptStep(self.cache, layer_idx, layer, call.needs, new)
        key, value = (
            tensor.new_zeros(*tensor.shape[:2], 1, 1).expand(-1, -1, call.step.total, tensor.shape[-1])
            for tensor in (key, value)
        )
        return key, value

    def update_all(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` of a cache that keeps all tokens."""
        kept, states = self.layer.kept_keys, self.call.key_states
        if kept is not None:
            return self.update_kept(key, value, kept, layer_idx, *args, **kwargs)
        if states is None:
            return store(self.cache, layer_idx, key, value, *args, **kwargs)
        width, heads, per_head = key.shape[-1], states.shape[1], states.shape[-1]
        beside = grouped(states, key.shape[1]).to(key.dtype)
        key, value = store(self.cache, layer_idx, torch.cat([key, beside], dim=-1), value, *args, **kwargs)
        self.call.key_states = ungrouped(key[..., width:], heads, per_head)  # (B, H, Lk, w)
        return key[..., :width], value

    def update_kept(
        self, key: torch.Tensor, value: torch.Tensor, kept: list[int], layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` if only the keys of the groups `kept` are needed."""
        states, width = self.call.key_states, key.shape[-1]
        value = self.layer.all_values(value, self.call.hidden_states)
        if key.shape[1] != len(kept):
            key = key[:, kept]
        flat = key.transpose(1, 2).flatten(2)  # (B, L, G' · d_h)
        keys_width = flat.shape[-1]
        if states is not None:  # (B, 1, L, w): groups of heads have one head of key states
            flat = torch.cat([flat, states[:, 0].to(flat.dtype)], dim=-1)
        stored, value = store(
            self.cache, layer_idx, grouped(flat.unsqueeze(1), value.shape[1]), value, *args, **kwargs
        )
        flat = ungrouped(stored, 1, flat.shape[-1])[:, 0]
        if states is not None:
            self.call.key_states = flat[..., keys_width:].unsqueeze(1)
        return flat[..., :keys_width].unflatten(-1, (len(kept), width)).transpose(1, 2), value
