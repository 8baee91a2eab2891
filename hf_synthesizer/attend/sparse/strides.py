"""Attention in windows, strides and blocks. Reshaping turns each of them into a batch of dense attention."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...choices.patterns import Pattern, near_heads
from .rows import Rows

BLOCK = 32  # fewest queries of a window: smaller windows cost more calls than they save in products


def strided_attention(choice: Pattern, rows: Rows) -> torch.Tensor:
    """`sparse_strided`: a window for the first heads, every l-th key for the others."""
    stride = _bounded_stride(choice, rows)
    near, far = _split_heads(rows)
    return _join_heads([window_attention(near, stride), column_attention(far, stride)])


def fixed_attention(choice: Pattern, rows: Rows) -> torch.Tensor:
    """`sparse_fixed`: a query's own block for the first heads, the last column of every block for the others."""
    stride = _bounded_stride(choice, rows)
    near, far = _split_heads(rows)
    return _join_heads([block_attention(near, stride), last_column_attention(far, stride)])


def window_attention(rows: Rows, stride: int) -> torch.Tensor:
    """|i − j| ≤ l: each block of queries attends to the keys from l before it to l after it."""
    if rows.value.shape[1] == 0:
        return rows.value
    size = max(stride, BLOCK)
    count = -(-rows.length // size)
    behind = 0 if rows.causal else stride
    reach = stride + size + behind  # keys of a block
    start = size * rows.indices(count)[:, None, None]
    i = start + rows.indices(size)[:, None]  # (p, size, 1)
    j = start + rows.indices(reach) - stride  # (p, 1, reach)
    allowed = ((i - j).abs() <= stride) & (j >= 0) & (j < rows.length)
    more = size * count - rows.length
    query = functional.pad(rows.query, (0, 0, 0, more)).unflatten(-2, (count, size))
    key, value = (
        functional.pad(x, (0, 0, stride, more + behind)).unfold(-2, reach, size).transpose(-1, -2)
        for x in (rows.key, rows.value)
    )  # (b, h, p, reach, …)
    output = rows.dense_attention(query, key, value, rows.additive_mask(i, j, allowed))
    return rows.without_holes(output.flatten(2, 3)[:, :, : rows.length])


def column_attention(rows: Rows, stride: int) -> torch.Tensor:
    """(i − j) mod l = 0: the row becomes a table of l columns; tokens attend within their column."""
    if rows.value.shape[1] == 0:
        return rows.value
    count = -(-rows.length // stride)
    query, key, value = (_as_table(x, count, stride).transpose(2, 3) for x in (rows.query, rows.key, rows.value))
    indices = rows.indices(count * stride).view(count, stride).t()  # (l, count)
    output = rows.dense_attention(query, key, value, rows.mask_within(indices))
    return rows.without_holes(output.transpose(2, 3).flatten(2, 3)[:, :, : rows.length])


def block_attention(rows: Rows, stride: int) -> torch.Tensor:
    """i div l = j div l: the row becomes a table of l columns; tokens attend within their row."""
    if rows.value.shape[1] == 0:
        return rows.value
    count = -(-rows.length // stride)
    query, key, value = (_as_table(x, count, stride) for x in (rows.query, rows.key, rows.value))
    indices = rows.indices(count * stride).view(count, stride)
    output = rows.dense_attention(query, key, value, rows.mask_within(indices))
    return rows.without_holes(output.flatten(2, 3)[:, :, : rows.length])


def last_column_attention(rows: Rows, stride: int) -> torch.Tensor:
    """j mod l = l − 1: all queries attend to every l-th key."""
    if rows.value.shape[1] == 0 or rows.length < stride:
        return torch.zeros_like(rows.value)
    key, value = (x[:, :, stride - 1 :: stride].unsqueeze(2) for x in (rows.key, rows.value))
    i = rows.indices(rows.length)[None, :, None]
    j = (rows.indices(key.shape[-2]) * stride + stride - 1)[None, None, :]
    allowed = torch.ones((), dtype=torch.bool, device=j.device)
    mask = None if rows.is_plain else rows.additive_mask(i, j, allowed)
    output = rows.dense_attention(rows.query.unsqueeze(2), key, value, mask)
    return rows.without_holes(output.squeeze(2))


def _as_table(x: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """(b, h, n, r) reshaped to (b, h, count, l, r), padded with zeros at the end."""
    return functional.pad(x, (0, 0, 0, count * stride - x.shape[-2])).unflatten(-2, (count, stride))


def _bounded_stride(choice: Pattern, rows: Rows) -> int:
    """l, at most the length + 1: larger strides choose the same pairs, and would only add padding."""
    length = rows.value.shape[-2]
    return min(choice.stride_of(length, rows.causal), length + 1)


def _split_heads(rows: Rows) -> tuple[Rows, Rows]:
    near = near_heads(rows.value.shape[1])
    return rows.of_heads(slice(0, near)), rows.of_heads(slice(near, None))


def _join_heads(parts: list[torch.Tensor]) -> torch.Tensor:
    # Laid out as (b, n, H, d_v), which the output projection reads.
    return torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)
