"""From terms to operands: terms are summed, weights multiplied in, widths padded. All is differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ...logits.masks import AttentionMask
from ..kernel_terms import KernelTerms
from ..randomness import draw_seed
from ..terms import AddedTerm, Terms
from .blocks import WIDTHS, Specialisation
from .launch import KernelAttention, Launch, Operands, kernel_output

ALIGNED = 16
"""If this divides strides and addresses, the compiler loads whole vectors."""


def launch_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    device = value.device.type
    if torch.is_autocast_enabled(device):
        value = value.to(torch.get_autocast_dtype(device))  # as autocast casts operands of products
    with torch.autocast(device, enabled=False):
        launch, operands = prepare(terms, value, mask, dropout)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands):
            output = KernelAttention.apply(launch, *operands)
        else:
            output = kernel_output(launch, operands)[0]
    return output[..., : value.shape[-1]]


def prepare(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> tuple[Launch, Operands]:
    """The launch and its operands."""
    batch, heads, key_length, width = value.shape
    kernel_terms = KernelTerms.of(terms, value)
    query, key = kernel_terms.query, kernel_terms.key
    width = width if query is None else max(width, query.shape[-1])
    width = next(each for each in WIDTHS if each >= width)
    inner, outer = None, None
    if kernel_terms.outer_products:
        inner, outer = (expanded(factor, value).float().contiguous() for factor in kernel_terms.outer_products[0])
    table, weight = summed_table(kernel_terms, value, terms.query_length)
    launch = Launch(
        Specialisation("forward", value.dtype, width, query is not None, table is not None, inner is not None),
        batch=batch,
        heads=heads,
        query_length=terms.query_length,
        key_length=key_length,
        a=0 if inner is None else inner.shape[-1],
        b=0 if outer is None else outer.shape[-1],
        causal_offset=key_length if mask.causal_offset is None else int(mask.causal_offset),
        dropout=dropout,
        seed=draw_seed(dropout, value),
    )
    operands = Operands(
        value=padded(value, width),
        query=None if query is None else expanded(padded(query, width), value),
        key=None if key is None else expanded(padded(key, width), value),
        table=table,
        weight=weight,
        inner=inner,
        outer=outer,
        bias=masked_key_bias(kernel_terms, mask, value),
    )
    return launch, operands


def expanded(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor (1 or B, 1 or H, L, w) with all rows of the batch and heads, as a view."""
    return tensor.expand(*value.shape[:2], -1, -1)


def summed_table(
    terms: KernelTerms, value: torch.Tensor, query_length: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The table (H or 1, Lq, Lk) and the weight (H,) of all terms with a number for each query, summed.

    A kernel without a product or with an outer product always has a table. If there is none, it is zeros, with stride 0
    over rows.
    """
    weight = value.new_ones(value.shape[1], dtype=torch.float32)
    tables = [term for term in terms.added if term.tensor.shape[2] > 1]
    if not tables:
        if terms.query is not None and not terms.outer_products:
            return None, None
        return value.new_zeros(1, 1, value.shape[-2], dtype=torch.float32).expand(1, query_length, -1), weight
    table = summed(tables) if len(tables) > 1 else tables[0].tensor
    if len(tables) == 1 and tables[0].weight is not None:
        weight = tables[0].weight.float().contiguous()
    table = table[0].float()
    return table if table.stride(-1) == 1 else table.contiguous(), weight


def masked_key_bias(terms: KernelTerms, mask: AttentionMask, value: torch.Tensor) -> torch.Tensor:
    """The added terms with one number for each key, (1 or B, 1 or H, Lk), with −∞ for keys that the mask hides."""
    biases = [term for term in terms.added if term.tensor.shape[2] == 1]
    if not biases:
        bias = value.new_zeros(1, 1, value.shape[-2], dtype=torch.float32)
    else:
        bias = summed(biases).squeeze(-2).float()
    if mask.keep is not None:
        bias = torch.where(mask.keep.squeeze(-2), bias, float("-inf"))
    return bias.contiguous()


def summed(terms: Sequence[AddedTerm]) -> torch.Tensor:
    return KernelTerms(None, None, added=terms).logits(terms[0].tensor.shape[-1])[0]


def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor (B or 1, H, L, w) padded to `width` and in the kernels' layout; a copy only if needed."""
    if tensor.shape[-1] < width:
        tensor = functional.pad(tensor, (0, width - tensor.shape[-1]))
    aligned = all(
        size == 1 or stride % ALIGNED == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)
    )
    if tensor.stride(-1) == 1 and aligned and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
