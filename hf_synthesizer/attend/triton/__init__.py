"""The Triton route: one kernel for any sum of low-rank, static, outer-product and key-bias terms, where Triton runs.

Softmax and sums go along with the walk over the keys, so that nothing of size B·H·Lq·Lk is ever made, and one number a row is
all that the backward needs. It makes the tiles again, dropout included: whether a weight is dropped is a function of a
seed and of its place.

This module alone may be imported without Triton. Not yet measured on a GPU (docs/accelerators.md).
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from ...masks import AttentionMask
from ...tracing import traced
from ..terms import Terms

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
"""Values, and all low-rank terms side by side."""

__all__ = ["attend", "serves"]


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """What no fused kernel serves, on a device that Triton compiles for, after its check on that device.

    Low-rank terms alone are left to `scaled_dot_product_attention`. `HF_SYNTHESIZER_TRITON=0` turns the route off.
    """
    if not available(value.device.type) or traced() or not fits(terms, value, mask):
        return False
    if terms.low_rank and not (terms.static or terms.tiled or terms.key_bias is not None):
        return False
    if value.device.type == "cpu":
        return True
    from .check import passes

    return passes(terms, value)


def available(device_type: str) -> bool:
    """Whether kernels run on such a device: on a processor in Triton's interpreter alone."""
    if os.environ.get("HF_SYNTHESIZER_TRITON") == "0" or not installed():
        return False
    return device_type == ("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def fits(terms: Terms, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether the kernel can do it at all."""
    if value.dtype not in DTYPES or isinstance(mask.causal_offset, torch.Tensor):
        return False
    if mask.keep is not None and mask.keep.shape[-2] != 1:
        return False
    if terms.explicit or len(terms.tiled) > 1:
        return False
    rank = sum(query.shape[-1] for query, _ in terms.low_rank)
    rank += sum(term.table.shape[-1] for term in terms.static if term.keys is not None)
    return max(rank, value.shape[-1]) <= WIDEST


def attend(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    from .operands import attend as launched

    return launched(terms, value, mask, dropout)
