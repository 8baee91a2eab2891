"""From terms to the kernels' operands: terms are summed, weights multiplied in, widths padded. All steps are differentiable."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...logits.masks import AttentionMask
from ..terms import Terms
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
    query, key = terms.joined_with_factors(value)
    width = width if query is None else max(width, query.shape[-1])
    width = next(each for each in WIDTHS if each >= width)
    table, weight = summed_table(terms, value, needed=query is None or bool(terms.tiled))
    inner, outer = (
        (expanded(factor, value).float().contiguous() for factor in terms.tiled[0][:2])
        if terms.tiled
        else (None, None)
    )
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
        seed=int(torch.randint(1 << 62, ())) if dropout else 0,
    )
    operands = Operands(
        value=padded(value, width),
        query=None if query is None else expanded(padded(query, width), value),
        key=None if key is None else expanded(padded(key, width), value),
        table=table,
        weight=weight,
        inner=inner,
        outer=outer,
        bias=masked_key_bias(terms, mask, value),
    )
    return launch, operands


def expanded(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor (1 or B, 1 or H, L, w) with all rows of the batch and heads, as a view."""
    return tensor.expand(*value.shape[:2], -1, -1)


def summed_table(terms: Terms, value: torch.Tensor, needed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The table (H or 1, Lq, Lk) and the weight (H,) of all whole static terms; several are summed.

    If there is no such term but a table is `needed`, it is zeros, with stride 0 over rows.
    """
    tables = [term for term in terms.static if term.keys is None]
    weight = value.new_ones(value.shape[1], dtype=torch.float32)
    if not tables:
        if not needed:
            return None, None
        return value.new_zeros(1, 1, value.shape[-2], dtype=torch.float32).expand(1, terms.query_length, -1), weight
    if len(tables) > 1:
        table = sum((term.materialize() for term in tables[1:]), start=tables[0].materialize())
    else:
        table = tables[0].table
        if tables[0].weight is not None:
            weight = tables[0].weight.float().contiguous()
    table = table.float()
    return table if table.stride(-1) == 1 else table.contiguous(), weight


def masked_key_bias(terms: Terms, mask: AttentionMask, value: torch.Tensor) -> torch.Tensor:
    """The key bias (1 or B, 1 or H, Lk), with −∞ for keys that the mask hides."""
    if terms.key_bias is None:
        bias = value.new_zeros(1, 1, value.shape[-2], dtype=torch.float32)
    else:
        bias = terms.key_bias.squeeze(-2).float()
    if mask.keep is not None:
        bias = torch.where(mask.keep.squeeze(-2), bias, float("-inf"))
    return bias.contiguous()


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
