"""Attention from logits and values: mask, softmax, dropout and matrix product, by the fastest route for a form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..device.processor import as_accelerator, on_processor
from ..device.tracing import traced
from ..logits.forms import Grouped, Logits, Sparse
from ..logits.masks import AttentionMask
from ..logits.reach import Windowed
from . import band, chunked, grouped, native, reference, sdpa, sparse, static, triton
from .terms import Terms

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """A way to compute attention: `serves(terms, value, mask, dropout)`, and `attention` of the same arguments."""

    serves: Callable[[Terms, torch.Tensor, AttentionMask, float], bool]
    attention: Callable[..., torch.Tensor]


ROUTES = {
    "static": Route(static.serves, static.static_attention),
    "native": Route(native.serves, native.native_attention),
    "sdpa": Route(sdpa.serves, sdpa.sdpa_attention),
    "triton": Route(triton.serves, triton.triton_attention),
    "chunked": Route(chunked.serves, chunked.chunked_attention),
}
"""The fast routes. `choose_route` takes the first that serves.

`native` serves processors and `triton` other devices, where their kernels can be built. `chunked` serves the rest on
every device. In tests, `as_accelerator()` gives a processor the routes of the other devices.
"""
FAR_ROUTES = {
    "band": Route(band.serves, band.band_attention),
    "native": ROUTES["native"],
    "chunked": ROUTES["chunked"],
}
"""The routes for logits by distance and for windows, whose cost grows with the length and not with its square."""
FEW_LOGITS = 1 << 16
"""Number of logits in a row of the batch, over all heads. Up to this number, training on a processor is faster with
plain operations on the whole batch than with chunks or with the kernel of `scaled_dot_product_attention`."""
FEW_TILED_LOGITS = 1 << 13
"""The same limit for logits with an outer product, which is large: autograd would keep it."""

__all__ = ["ROUTES", "as_accelerator", "attend", "choose_route"]


def choose_route(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> str:
    """The name of the first route that serves these terms, else `"reference"`.

    A single query (a step of decoding) always takes the reference: one row of weights needs little memory. Training on
    short sequences takes it too, unless the static or the native route serves.
    """
    if terms.query_length == 1:
        return "reference"
    for name, route in ROUTES.items():
        if route.serves(terms, value, mask, dropout):
            return "reference" if name not in ("static", "native") and trains_on_few(terms, value) else name
    return "reference"


def trains_on_few(terms: Terms, value: torch.Tensor) -> bool:
    """Whether this is training on a processor with so few logits that chunks gain nothing."""
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
        logits: any form of logits (B or 1, H, Lq, Lk).
        value: (B, H, Lk, d_v).
        mask: broadcasts to the logits' shape; None hides nothing.
        dropout: the probability with which a weight is dropped; 0 outside training.
        need_weights: whether to return the weights too. Only the reference route computes them.

    Returns:
        The output (B, H, Lq, d_v), and the weights (B, H, Lq, Lk) or None.

    Raises:
        AttentionInputError: if the mask does not broadcast to (B, H, Lq, Lk).
    """
    mask = (
        AttentionMask() if mask is None else mask.expanded_to((*value.shape[:2], logits.query_length, value.shape[-2]))
    )
    if isinstance(logits, Grouped):
        simplified = mask if need_weights or traced() else mask.simplified()  # once for all groups
        return grouped.grouped_attention(logits, value, simplified, attend, dropout=dropout, need_weights=need_weights)
    if isinstance(logits, Windowed):
        mask = logits.restricted(mask if need_weights or traced() else mask.simplified(), value.device)
        logits = logits.logits
    if need_weights:
        return reference.reference_attention(logits, value, mask, dropout)
    if value.is_meta and mask.reach is not None:  # the first tokens of rows are read, and there are none
        return reference.reference_attention(logits, value, mask, dropout)[0], None
    simplified = mask if traced() else mask.simplified()
    if isinstance(logits, Sparse):
        causal = logits.require_direction(mask)
        if mask.reach is None and sparse.serves(logits, value, simplified):
            logger.debug("%s logits for values %s: route sparse", type(logits).__name__, tuple(value.shape))
            return sparse.sparse_attention(logits, value, simplified, causal, dropout), None
        logits, mask = logits.with_chosen_keys(mask)
        simplified = mask if traced() else mask.simplified()
    mask = simplified
    terms = Terms.of(logits, mask)
    if (terms.relative or mask.reach is not None) and terms.query_length > 1 and not trains_on_few(terms, value):
        for name, far_route in FAR_ROUTES.items():
            if far_route.serves(terms, value, mask, dropout):
                logger.debug("%s logits for values %s: route %s", type(logits).__name__, tuple(value.shape), name)
                return far_route.attention(terms, value, mask, dropout), None
    terms.materialize_relative()
    mask = mask.without_reach()
    route = choose_route(terms, value, mask, dropout)
    if not traced():
        logger.debug("%s logits for values %s: route %s", type(logits).__name__, tuple(value.shape), route)
    if route == "reference":
        return reference.reference_attention(logits, value, mask, dropout)[0], None
    if route != "static":
        terms.materialize_weights()
    return ROUTES[route].attention(terms, value, mask, dropout), None
