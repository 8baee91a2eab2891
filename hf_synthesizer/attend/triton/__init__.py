"""The Triton route: one kernel for any sum of low-rank, static, outer-product and key-bias terms, where Triton runs.

Softmax and sums are updated key by key, so no tensor has B·H·Lq·Lk numbers. The backward needs one number a row. It
recomputes the tiles, with the same dropout: dropout is a function of a seed and of the weight's position.

This module and `blocks` may be imported without Triton. Not yet measured on a GPU (docs/accelerators.md).
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from ...device.processor import on_processor
from ...device.tracing import traced
from ...logits.masks import AttentionMask
from ..terms import Terms
from .blocks import DTYPES, WIDTHS

OLDEST_CAPABILITY = (8, 0)
"""The lowest compute capability that the kernels support."""

__all__ = ["serves", "triton_attention"]


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Up to one outer-product term and any number of the others, on a device that has passed its check.

    `HF_SYNTHESIZER_TRITON=0` turns the route off.
    """
    if traced() or on_processor(value.device) or not available(value.device):
        return False
    if not fits(terms, value, mask, dropout):
        return False
    from .check import passes_check

    return passes_check(value.device)


def available(device: torch.device) -> bool:
    """Whether kernels run on this device; on a processor, only in Triton's interpreter."""
    if os.environ.get("HF_SYNTHESIZER_TRITON") == "0" or not installed():
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return device.type == "cpu"
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    )


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def fits(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Whether the kernels support these terms, dtypes and masks."""
    if value.dtype not in DTYPES or dropout >= 1 or isinstance(mask.causal_offset, torch.Tensor):
        return False
    if mask.keep is not None and mask.keep.shape[-2] != 1:
        return False
    if terms.explicit or terms.placed or len(terms.tiled) > 1:
        return False
    rank = sum(query.shape[-1] for query, _ in terms.low_rank)
    rank += sum(term.table.shape[-1] for term in terms.static if term.keys is not None)
    return max(rank, value.shape[-1]) <= WIDTHS[-1]


def triton_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    from .operands import launch_attention

    return launch_attention(terms, value, mask, dropout)
