"""How logits meet values: mask, softmax, dropout, matmul, by the fastest exact route that the logits' form allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..device.tracing import as_accelerator, on_processor, traced
from ..logits.forms import Grouped, Logits, Sparse
from ..logits.masks import AttentionMask
from . import grouped, native, reference, sdpa, sparse, static, strips, tiled, triton
from .terms import Terms

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """A way to compute attention: `serves(terms, value, mask, dropout)`, and `attention` of the same arguments."""

    serves: Callable[[Terms, torch.Tensor, AttentionMask, float], bool]
    attention: Callable[..., torch.Tensor]


ROUTES = {
    "static": Route(static.serves, static.static_attention),
    "native": Route(native.serves, native.native_attention),
    "tiled": Route(tiled.serves, tiled.tiled_attention),
    "sdpa": Route(sdpa.serves, sdpa.sdpa_attention),
    "triton": Route(triton.serves, triton.triton_attention),
    "strips": Route(strips.serves, strips.strips_attention),
}
"""The fast routes. `choose_route` takes the first that serves.

`tiled` serves processors. On all other devices `triton` serves what its kernels support, and `strips` serves the rest.
In tests, `as_accelerator()` gives a processor the routes of the other devices.
"""
FEW_LOGITS = 1 << 16
"""Logits of a row of the batch, all heads. Up to so many, a processor trains faster with plain operations on the whole
batch than tile by tile, or through a kernel whose backward is slow in bfloat16."""
FEW_TILED_LOGITS = 1 << 13
"""The same where there is a tiled term, whose outer product is dear to keep."""

__all__ = ["ROUTES", "as_accelerator", "attend", "choose_route"]


def choose_route(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> str:
    """The name of the route that serves these terms: the first that says so, else `"reference"`.

    One query, a step of decoding, is always the reference's: there is one row of weights, and nothing to save. So is
    training on short sequences, unless the static route serves it.
    """
    if terms.query_length == 1:
        return "reference"
    for name, route in ROUTES.items():
        if route.serves(terms, value, mask, dropout):
            return "reference" if name not in ("static", "native") and trains_on_few(terms, value) else name
    return "reference"


def trains_on_few(terms: Terms, value: torch.Tensor) -> bool:
    """Whether a gradient is wanted, on a processor, through so few logits that nothing is gained by cutting them up."""
    if traced() or not on_processor(value.device) or not torch.is_grad_enabled():
        return False
    logits = value.shape[1] * terms.query_length * value.shape[-2]
    return logits <= (FEW_TILED_LOGITS if terms.tiled else FEW_LOGITS)


def attend(
    logits: Logits,
    value: torch.Tensor,
    mask: AttentionMask | None = None,
    *,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`softmax(logits + mask) @ value`.

    Args:
        logits: any form, standing for (B or 1, H, Lq, Lk).
        value: (B, H, Lk, d_v).
        mask: what to hide and to add, of a shape that broadcasts to the logits'; nothing if None.
        dropout: the probability with which a weight is dropped; 0 outside training.
        need_weights: whether the weights are wanted too. Only the reference route has them.

    Returns:
        The output (B, H, Lq, d_v), and the weights (B, H, Lq, Lk) or None.

    Raises:
        AttentionInputError: for a mask that does not broadcast to (B, H, Lq, Lk).
    """
    mask = (
        AttentionMask() if mask is None else mask.expanded_to((*value.shape[:2], logits.query_length, value.shape[-2]))
    )
    if isinstance(logits, Grouped):
        simplified = mask if need_weights or traced() else mask.simplified()  # once for all groups
        return grouped.grouped_attention(logits, value, simplified, attend, dropout=dropout, need_weights=need_weights)
    if need_weights:
        return reference.reference_attention(logits, value, mask, dropout)
    simplified = mask if traced() else mask.simplified()
    if isinstance(logits, Sparse):
        causal = logits.require_direction(mask)
        if sparse.serves(logits, value, simplified):
            logger.debug("%s logits for values %s: route sparse", type(logits).__name__, tuple(value.shape))
            return sparse.sparse_attention(logits, value, simplified, causal, dropout), None
        logits, mask = logits.with_chosen_keys(mask)
        simplified = mask if traced() else mask.simplified()
    mask = simplified
    terms = Terms.of(logits, mask)
    route = choose_route(terms, value, mask, dropout)
    if not traced():
        logger.debug("%s logits for values %s: route %s", type(logits).__name__, tuple(value.shape), route)
    if route == "reference":
        return reference.reference_attention(logits, value, mask, dropout)[0], None
    if route != "static":
        terms.materialize_weights()
    return ROUTES[route].attention(terms, value, mask, dropout), None
