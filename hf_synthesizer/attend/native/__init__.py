"""The native route: one pass in C++ over any sum of low-rank, static, outer-product and key-bias terms, on a processor.

A tile of logits is computed, exponentiated and multiplied with the values while it is in the cache. Each thread has its
own rows, so threads never wait for each other. The backward recomputes the tiles from one number a row. Dropout is a
function of a seed and of the weight's position. `build` compiles the library; without it, the other routes serve.
"""

from __future__ import annotations

import torch

from ...device.processor import on_processor
from ...device.tracing import traced
from ...logits.masks import AttentionMask
from ..operand_checks import is_plain
from ..terms import Terms
from .blocks import near_blocks
from .build import library, unavailable_reason, without_kernels

__all__ = [
    "native_attention",
    "near_attention",
    "near_blocks",
    "serves",
    "serves_shared_weights",
    "shared_weights_attention",
    "unavailable_reason",
    "without_kernels",
]


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Everything that the kernels support, if they are available. `HF_SYNTHESIZER_NATIVE=0` turns the route off."""
    if traced() or not on_processor(value.device) or not fits(terms, value, mask, dropout):
        return False
    return library() is not None


def fits(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Whether the kernels support these terms, dtypes and masks."""
    from .operands import DTYPES, MOST_ADDED, MOST_OUTERS

    if value.dtype not in DTYPES or dropout >= 1 or len(terms.tiled) > MOST_OUTERS:
        return False
    if isinstance(mask.causal_offset, torch.Tensor) or (mask.causal_offset is not None and mask.causal_offset < 0):
        return False
    if terms.placed or 0 in value.shape:
        return False
    added = terms.added()
    if len(added) > MOST_ADDED:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad and t.shape[1] == 1 < value.shape[1] for t, *_ in added):
        return False  # all heads share the table, so threads would have to share its gradient
    reach = mask.reach
    if reach is not None and (reach.positions.per_row or isinstance(reach.positions.start, torch.Tensor)):
        return False
    tensors = [tensor for tensor, *_ in added] + [factor for pair in terms.tiled for factor in pair]
    compared = [factor for pair in terms.low_rank for factor in pair]
    compared += [factor for term in terms.static if term.keys is not None for factor in (term.table, term.keys)]
    if not tensors and not any(factor.shape[-1] for factor in compared):
        return False  # logits without terms: the kernels would not write them
    return all(tensor.dtype in DTYPES for tensor in tensors) and all(
        map(is_plain, (value, mask.keep, *tensors, *compared))
    )


def native_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    from .autograd import attention_by_kernels
    from .build import Library
    from .operands import KernelInputs

    kernels: Library | None = library()
    assert kernels is not None  # `serves` has checked this
    with torch.autocast("cpu", enabled=False):
        inputs, tensors = KernelInputs.of(terms, value, mask, dropout, kernels.bfloat16)
        return attention_by_kernels(inputs, tensors)


def near_attention(
    terms: Terms, value: torch.Tensor, mask: AttentionMask, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the keys in the blocks that a block of queries sees through a window (`near_blocks`).

    Returns the output (B, H, Lq, d_v) over these keys, and log Σ exp of their logits, (B, H, Lq).
    """
    from dataclasses import replace

    from .autograd import attention_and_normalisers
    from .operands import KernelInputs

    kernels = library()
    assert kernels is not None  # `serves` has checked this
    with torch.autocast("cpu", enabled=False):
        inputs, tensors = KernelInputs.of(terms, value, mask, 0.0, kernels.bfloat16)
        return attention_and_normalisers(replace(inputs, near=window), tensors)


def serves_shared_weights(terms: Terms, value: torch.Tensor) -> bool:
    """Whether the kernels can share weights over the batch: static terms only, without gradients."""
    from .operands import DTYPES

    tensors = [value, *(tensor for term in terms.static for tensor in term if tensor is not None)]
    if terms.weights is not None or traced() or 0 in value.shape:
        return False
    if not all(tensor.dtype in DTYPES and is_plain(tensor) for tensor in tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return on_processor(value.device) and library() is not None


def shared_weights_attention(
    terms: Terms, value: torch.Tensor, causal_offset: int | None, factor: torch.Tensor | None
) -> torch.Tensor:
    """The output (B, H, Lq, d_v) of static terms.

    `factor` (1 or B, 1 or H, Lk, 1) multiplies each key's weights before they are normalised.
    """
    from dataclasses import replace

    from .autograd import native_output
    from .operands import KernelInputs

    kernels = library()
    assert kernels is not None  # `serves_shared_weights` has checked this
    static_terms = Terms(static=terms.static, query_length=terms.query_length)
    mask = AttentionMask(causal_offset=causal_offset)
    inputs, tensors = KernelInputs.of(static_terms, value, mask, 0.0, kernels.bfloat16)
    factor = None if factor is None else factor.detach().float().transpose(-1, -2).contiguous()
    return native_output(replace(inputs, shared=True, factor=factor), tensors)[0].transpose(1, 2)
