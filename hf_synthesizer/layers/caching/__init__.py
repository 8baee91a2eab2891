"""What layers keep of earlier tokens, in the caches of Transformers."""

from .dropping import can_drop, drop, drop_first, split_states
from .kept import Kept, KeptLayer, NewTokens, bytes_of
from .kinds import self_attention_cache
from .needs import Need, needs_of
from .step import KeptStep, layer_that_drops
from .store import dropped_tokens, extend, grouped, past_length, store, tokens_before, ungrouped

__all__ = [
    "Kept",
    "KeptLayer",
    "KeptStep",
    "Need",
    "NewTokens",
    "bytes_of",
    "can_drop",
    "drop",
    "drop_first",
    "dropped_tokens",
    "extend",
    "grouped",
    "layer_that_drops",
    "needs_of",
    "past_length",
    "self_attention_cache",
    "split_states",
    "store",
    "tokens_before",
    "ungrouped",
]
