"""Attention in windows, strides and blocks. Reshaping turns each of them into a batch of dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..choices.patterns import Pattern, near_heads
from .sdpa import kernel_attention

if TYPE_CHECKING:
    from .sparse import Rows

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


class HeadInputs:
    """Some heads of some rows, with scaled queries: query, key (b, h, n, r), value (b, h, n, d_v)."""

    def __init__(self, rows: Rows, heads: slice):
        self.query = rows.query[:, heads]
        self.key = rows.key[:, heads]
        self.value = rows.value[:, heads]
        self.bias = rows.bias
        if self.bias is not None and self.bias.shape[1] > 1:
            self.bias = self.bias[:, heads]
        self.holes = rows.holes
        self.scaling = rows.scaling
        self.dropout = rows.dropout
        self.causal = rows.causal
        self.batch, self.heads, self.length, self.width = self.value.shape

    def additive_mask(self, i: torch.Tensor, j: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """The additive mask of the pairs (i, j): (1 or b, 1 or h, *P), −∞ where a query does not see a key.

        A float tensor even without a bias: the kernel would convert a bool tensor for each head.

        The indices `i` and `j` broadcast with `allowed` to P. Indices beyond the row are not allowed.
        """
        last = self.length - 1
        i, j = i.clamp(0, last), j.clamp(0, last)
        if self.causal:
            allowed = allowed & (j <= i)
        allowed = allowed.expand(torch.broadcast_shapes(i.shape, j.shape))[None, None]
        if self.holes is not None:
            allowed = allowed & self.holes[:, j].unsqueeze(1)
        if self.bias is None:
            return torch.zeros(allowed.shape, dtype=self.query.dtype, device=j.device).masked_fill(
                ~allowed, float("-inf")
            )
        bias = self.bias[..., 0, :][..., j] if self.bias.shape[-2] == 1 else self.bias[..., i, j]
        return bias.to(self.query.dtype).masked_fill(~allowed, float("-inf"))

    @property
    def is_plain(self) -> bool:
        """Whether no mask is needed: no padding, no bias, not causal."""
        return self.bias is None and self.holes is None and not self.causal

    def mask_within(self, indices: torch.Tensor) -> torch.Tensor | None:
        """`additive_mask` for groups of tokens that attend to each other, given their indices (p, size); None if no mask is needed."""
        if self.is_plain and indices.numel() == self.length:
            return None
        i, j = indices.unsqueeze(-1), indices.unsqueeze(-2)
        return self.additive_mask(i, j, j < self.length)

    def dense_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Dense attention in p groups, with tensors (b, h, p, …, …) and a mask from `additive_mask`.

        A query without a visible key gets zeros.
        """
        if mask is not None:
            mask = mask.expand(self.batch, self.heads, -1, -1, -1).flatten(0, 1)
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        output = kernel_attention(query, key, value, mask, self.dropout, scale=self.scaling)
        return output.unflatten(0, (self.batch, self.heads))

    def indices(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.value.device)

    def without_holes(self, output: torch.Tensor) -> torch.Tensor:
        """The output with zeros at padding."""
        return output if self.holes is None else output * self.holes[:, None, :, None]


def window_attention(heads: HeadInputs, stride: int) -> torch.Tensor:
    """|i − j| ≤ l: each block of queries attends to the keys from l before it to l after it."""
    if heads.heads == 0:
        return heads.value
    size = max(stride, BLOCK)
    count = -(-heads.length // size)
    behind = 0 if heads.causal else stride
    reach = stride + size + behind  # keys of a block
    start = size * heads.indices(count)[:, None, None]
    i = start + heads.indices(size)[:, None]  # (p, size, 1)
    j = start + heads.indices(reach) - stride  # (p, 1, reach)
    allowed = ((i - j).abs() <= stride) & (j >= 0) & (j < heads.length)
    more = size * count - heads.length
    query = functional.pad(heads.query, (0, 0, 0, more)).unflatten(-2, (count, size))
    key, value = (
        functional.pad(x, (0, 0, stride, more + behind)).unfold(-2, reach, size).transpose(-1, -2)
        for x in (heads.key, heads.value)
    )  # (b, h, p, reach, …)
    output = heads.dense_attention(query, key, value, heads.additive_mask(i, j, allowed))
    return heads.without_holes(output.flatten(2, 3)[:, :, : heads.length])


def column_attention(heads: HeadInputs, stride: int) -> torch.Tensor:
    """(i − j) mod l = 0: the row becomes a table of l columns; tokens attend within their column."""
    if heads.heads == 0:
        return heads.value
    count = -(-heads.length // stride)
    query, key, value = (_as_table(x, count, stride).transpose(2, 3) for x in (heads.query, heads.key, heads.value))
    indices = heads.indices(count * stride).view(count, stride).t()  # (l, count)
    output = heads.dense_attention(query, key, value, heads.mask_within(indices))
    return heads.without_holes(output.transpose(2, 3).flatten(2, 3)[:, :, : heads.length])


def block_attention(heads: HeadInputs, stride: int) -> torch.Tensor:
    """i div l = j div l: the row becomes a table of l columns; tokens attend within their row."""
    if heads.heads == 0:
        return heads.value
    count = -(-heads.length // stride)
    query, key, value = (_as_table(x, count, stride) for x in (heads.query, heads.key, heads.value))
    indices = heads.indices(count * stride).view(count, stride)
    output = heads.dense_attention(query, key, value, heads.mask_within(indices))
    return heads.without_holes(output.flatten(2, 3)[:, :, : heads.length])


def last_column_attention(heads: HeadInputs, stride: int) -> torch.Tensor:
    """j mod l = l − 1: all queries attend to every l-th key."""
    if heads.heads == 0 or heads.length < stride:
        return torch.zeros_like(heads.value)
    key, value = (x[:, :, stride - 1 :: stride].unsqueeze(2) for x in (heads.key, heads.value))
    i = heads.indices(heads.length)[None, :, None]
    j = (heads.indices(key.shape[-2]) * stride + stride - 1)[None, None, :]
    allowed = torch.ones((), dtype=torch.bool, device=j.device)
    mask = None if heads.is_plain else heads.additive_mask(i, j, allowed)
    output = heads.dense_attention(heads.query.unsqueeze(2), key, value, mask)
    return heads.without_holes(output.squeeze(2))


def _as_table(x: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """(b, h, n, r) reshaped to (b, h, count, l, r), padded with zeros at the end."""
    return functional.pad(x, (0, 0, 0, count * stride - x.shape[-2])).unflatten(-2, (count, stride))


def _bounded_stride(choice: Pattern, rows: Rows) -> int:
    """l, at most the length + 1: larger strides choose the same pairs, and would only add padding."""
    length = rows.value.shape[-2]
    return min(choice.stride_of(length, rows.causal), length + 1)


def _split_heads(rows: Rows) -> tuple[HeadInputs, HeadInputs]:
    near = near_heads(rows.value.shape[1])
    return HeadInputs(rows, slice(0, near)), HeadInputs(rows, slice(near, None))


def _join_heads(parts: list[torch.Tensor]) -> torch.Tensor:
    # Laid out as (b, n, H, d_v), which the output projection reads.
    return torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)
