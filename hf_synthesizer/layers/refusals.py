"""Errors for what synthesized layers cannot serve: stock attention classes, arguments, and states of another stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..errors import UnsupportedModelError

OTHER_LAYERS = "atch other layers (layers=…), or register a layer class for this class."
"""The advice at the end of each error about a stock attention class."""
READ_BY_ATTENTION = frozenset(
    ("alibi", "attention_bias", "block_table", "dropout", "head_mask", "layer_head_mask", "position_bias")
    + ("read_index", "s_aux", "scaling", "softcap", "write_index")
)
"""Keywords that some attention function of Transformers reads. All others are for the modules around a layer."""


def unsupported(stock: type[nn.Module], reason: str) -> UnsupportedModelError:
    """The error "`stock` `reason`. Patch other layers, or register a layer class"."""
    return UnsupportedModelError(f"{stock.__name__} {reason}. P{OTHER_LAYERS}")


def unsupported_but_dot_product(stock: type[nn.Module], reason: str) -> UnsupportedModelError:
    """The same error for a stock class whose own dot products can be kept (`"dot_product"` as the only variant)."""
    return UnsupportedModelError(f"{stock.__name__} {reason}. Patch it with dot_product alone or p{OTHER_LAYERS}")


def require_no_other_states(other: object) -> None:
    """Raise `UnsupportedModelError` if a layer is given the states of another stack, as cross-attention is."""
    if other is not None:
        raise UnsupportedModelError(
            "A synthesizer replaces self-attention only, but states of an encoder were given (key_value_states or "
            "encoder_hidden_states), which means cross-attention. Leave the cross-attention layer as it is."
        )


def require_known_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for a keyword argument that changes what the stock layer computes.

    Args:
        arguments: of the layer's `forward`, without those that its layer class handles. None counts as no argument.
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
        if name in READ_BY_ATTENTION:
            text = f"<Tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedModelError(
                f"The argument {name}={text} changes attention in a way that synthesized layers do not know. Leave "
                f"it out, or leave the layers that need it stock (layers=…)."
            )


def _is_cache(name: str, value: Any) -> bool:
    if isinstance(value, (bool, torch.Tensor)):  # use_cache and cache_position
        return False
    return isinstance(value, Cache) or "cache" in name.lower().split("_") or name.startswith("past_key")
