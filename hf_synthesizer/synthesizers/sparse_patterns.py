"""The two patterns of the Sparse Transformer: a query attends to keys at fixed positions."""

from __future__ import annotations

from math import isqrt
from typing import ClassVar

from ..choices import FixedBlocks, Strides
from ..choices.patterns import Pattern
from .options import Option
from .registry import register_variant
from .shared_projection import SharedProjectionSynthesizer


class PatternSynthesizer(SharedProjectionSynthesizer):
    """Shared queries and keys under a pattern of stride l: `stride`, or √L rounded down, or in a decoder √N."""

    options = {"stride": Option(None, "the stride l; default: √L of each row, in a decoder √N", kind=int)}
    pattern: ClassVar[type[Pattern]]

    def choice(self) -> Pattern:
        # All strides longer than the longest sequence are equivalent.
        stride = None if self.config.stride is None else min(self.config.stride, self.max_length + 1)
        return self.pattern(stride, max(1, isqrt(self.max_length)))


@register_variant("sparse_strided")
class SparseStridedSynthesizer(PatternSynthesizer):
    """Half of the heads attend to abs(i − j) ≤ l, the others to (i − j) mod l = 0.

    `sparse_strided` takes neighbours in the first half of the heads and every l-th key in the second half.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling where abs(i − j) ≤ l, or in half of the heads (i − j) mod l = 0"
    pattern = Strides


@register_variant("sparse_fixed")
class SparseFixedSynthesizer(PatternSynthesizer):
    """Half of the heads attend to their own block of l, the others to the last column of every block.

    `sparse_fixed` takes the query's own block, and the last column of each block.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling where i div l = j div l, or in half of the heads j mod l = l − 1"
    pattern = FixedBlocks
