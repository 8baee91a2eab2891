"""Checks that a stock forward calls our attention function in a way that synthesized logits can answer."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedModelError
from ...upstream.torch_names import base_of
from ..refusals import unsupported, unsupported_but_dot_product
from .call import StockForwardCall

CROSS_ATTENTION = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
MASKS = ("attention_mask", "mask")
"""Names of the mask in stock forwards."""
IN_THE_MASK = frozenset(
    [
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "position_ids",
        "sliding_window",
    ]
)
"""Arguments that stock forwards pass on and that eager and sdpa attention do not read: the mask says the same, or they are
for other backends."""


def require_self_attention(call: StockForwardCall) -> None:
    """Raise `UnsupportedModelError` for cross-attention."""
    if call.first(CROSS_ATTENTION) is not None:
        raise UnsupportedModelError(
            f"A synthesizer replaces self-attention only, but {call.layer.stock_class.__name__} was given other states to "
            f"attend to. Leave the cross-attention layer as it is (layers=…)."
        )


def require_known_options(call: StockForwardCall, options: dict[str, Any]) -> None:
    """Raise `UnsupportedModelError` for an argument that the stock forward itself passes to its attention function and that ours
    does not know, such as sinks or chosen keys."""
    for name, value in options.items():
        if value is not None and name not in call.arguments and name not in IN_THE_MASK:
            raise unsupported(
                call.layer.stock_class,
                f"passes {name}= on to its attention function, which may change attention in a way that synthesized layers do "
                f"not know",
            )


def require_whole_sequence(call: StockForwardCall, query: torch.Tensor) -> None:
    """Raise `UnsupportedModelError` unless these are the queries of all hidden states, and the first of this call."""
    layer, states = call.layer, call.hidden_states
    heads, width = layer.dimensions[1], layer.dimensions[0]
    fits = states.dim() == 3 and states.shape[:2] == (query.shape[0], query.shape[2]) and states.shape[-1] == width
    if call.answered:
        raise unsupported(
            layer.stock_class,
            "attends more than once in one forward pass, and synthesized logits could stand in for one of them only",
        )
    if not fits or query.shape[1] not in (heads, len(layer.compared)):
        raise unsupported(
            layer.stock_class,
            f"attends in pieces: for hidden states of shape {tuple(states.shape)} it hands over queries of shape "
            f"{tuple(query.shape)}. Positions in such a sequence are not known here",
        )


def require_unchanged_mask(call: StockForwardCall, mask: torch.Tensor | None) -> None:
    """Raise `UnsupportedModelError` if the stock forward added logits of its own to the mask.

    They may come from queries (relative positions of Transformer-XL), and synthesizers would not replace them.
    """
    original = call.first(MASKS)
    if mask is None or mask.dtype == torch.bool or mask is original or mask.is_meta:
        return
    base = base_of(mask)
    if original is not None and base is not None and (base is original or base is base_of(original)):
        return
    hidden = torch.finfo(mask.dtype).min / 2
    if torch.compiler.is_compiling() or not bool(((mask == 0) | (mask < hidden)).all()):
        raise unsupported_but_dot_product(
            call.layer.stock_class, "adds logits of its own to its mask, which would stay beside synthesized ones"
        )


def require_bias_of_positions(call: StockForwardCall, position_bias: torch.Tensor | None) -> None:
    """Raise `UnsupportedModelError` for a bias that may come from tokens. That of T5 comes from positions."""
    from_positions = "position_bias" in call.arguments or hasattr(call.layer, "has_relative_attention_bias")
    if position_bias is not None and not from_positions:
        raise unsupported_but_dot_product(
            call.layer.stock_class,
            "makes a bias of its own, which may come of its tokens and would stay beside synthesized logits",
        )
