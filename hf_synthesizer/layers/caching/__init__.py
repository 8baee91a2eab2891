"""What layers keep of earlier tokens, in the caches of Transformers."""

from .kinds import self_attention_cache
from .store import dropped_tokens, extend, grouped, past_length, store, tokens_before, ungrouped

__all__ = [
    "dropped_tokens",
    "extend",
    "grouped",
    "past_length",
    "self_attention_cache",
    "store",
    "tokens_before",
    "ungrouped",
]
