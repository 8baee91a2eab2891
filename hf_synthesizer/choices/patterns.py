"""The patterns of the Sparse Transformer (Child et al. 2019, arXiv 1904.10509): keys are chosen by position only.

l is `stride`, or √L rounded down, of the row's own length L; a decoder, which does not know the final length,
uses `causal_stride`. The first ⌈H/2⌉ heads have the first pattern, the others the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import torch

from ..logits.choice import Choice
from ..logits.tokens import Tokens


@dataclass(frozen=True)
class Pattern(Choice):
    """The base of both patterns: a stride, and two kinds of heads."""

    causal: ClassVar[bool] = True

    stride: int | None
    causal_stride: int

    def stride_of(self, length: int, causal: bool) -> int:
        """l for a row of `length` tokens."""
        if self.stride is not None:
            return self.stride
        return self.causal_stride if causal else max(1, isqrt(length))

    def chosen(self, query: torch.Tensor, key: torch.Tensor, tokens: Tokens, causal: bool) -> torch.Tensor:
        if self.stride is not None or causal:
            stride = torch.full((1, 1, 1), self.stride_of(0, True), device=key.device)
        else:
            stride = tokens.lengths(key.device).double().sqrt().long().clamp(min=1).unsqueeze(-1)  # (B or 1, 1, 1)
        i, j = tokens.positions(key.device)
        first, second = self.pairs(i.unsqueeze(-1), j.unsqueeze(-2), stride)  # (B or 1, Lq, Lk) each
        shape = torch.broadcast_shapes(first.shape, second.shape)
        heads = query.shape[1]
        one, other = (pairs.expand(shape).unsqueeze(1) for pairs in (first, second))
        return torch.cat((one.expand(-1, near_heads(heads), -1, -1), other.expand(-1, heads // 2, -1, -1)), dim=1)

    def pairs(self, i: torch.Tensor, j: torch.Tensor, stride: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which positions j the two kinds of heads choose at position i."""
        raise TypeError(f"{type(self).__name__} must define pairs()")


class Strides(Pattern):
    """|i − j| ≤ l; and (i − j) mod l = 0."""

    def pairs(self, i: torch.Tensor, j: torch.Tensor, stride: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (i - j).abs() <= stride, (i - j) % stride == 0


class FixedBlocks(Pattern):
    """i div l = j div l, the query's own block; and j mod l = l − 1, the last column of every block."""

    def pairs(self, i: torch.Tensor, j: torch.Tensor, stride: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own_block = i.div(stride, rounding_mode="floor") == j.div(stride, rounding_mode="floor")
        return own_block, j % stride == stride - 1


def near_heads(heads: int) -> int:
    """The number of heads with the first pattern: half of them, rounded up."""
    return heads - heads // 2
