"""Factorized Dense Synthesizer: a row of logits as the outer product of two short ones (section 3.4.1 of the paper)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..device.matmul import linear
from ..errors import InvalidConfigError
from ..logits.forms import Logits, Placed, Tiled
from ..logits.positions import Positions
from .base import Synthesizer
from .registry import register_variant


@register_variant("factorized_dense")
class FactorizedDenseSynthesizer(Synthesizer):
    """`S[h, i, j] = A[h, i, j mod a] · B[h, i, j div a]` with `A, B = relu(W1 x_i)[h] · WA[h], … · WB[h]`.

    One factor tiles and the other repeats, so that all a·b ≥ N columns are different.
    """

    formula = "A[h, i, j mod a] · B[h, i, j div a], A = relu(W1 x_i)[h] · WA[h], B = relu(W1 x_i)[h] · WB[h]"
    parameter_formula = "d² + d·(a + b)"
    options = frozenset({"share_heads", "factors"})

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        a, b = self.factors = self.config.factors or default_factors(self.max_length)
        if a * b < self.max_length:
            raise InvalidConfigError(
                f"factors=({a}, {b}) give a·b = {a * b} columns, but max_length = {self.max_length} positions need as "
                f"many. Choose a and b with a·b ≥ {self.max_length}, or leave factors out: the default is "
                f"{default_factors(self.max_length)}."
            )
        self.hidden = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.inner_weight = nn.Parameter(torch.empty(self.table_heads, self.head_dim, a))  # WA
        self.inner_bias = nn.Parameter(torch.zeros(self.table_heads, 1, a))
        self.outer_weight = nn.Parameter(torch.empty(self.table_heads, self.head_dim, b))  # WB
        self.outer_bias = nn.Parameter(torch.zeros(self.table_heads, 1, b))
        for weight in (self.inner_weight, self.outer_weight):
            nn.init.normal_(weight, std=0.5 * self.head_dim**-0.5)

    def start_at_zero(self) -> None:
        # One factor alone: if both were 0, the gradient of both would be 0.
        nn.init.zeros_(self.inner_weight)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        hidden = self.split_heads(linear(self.hidden, hidden_states).relu())  # (B, H, Lq, d_h)
        inner = hidden @ self.inner_weight + self.inner_bias  # (B, H, Lq, a)
        outer = hidden @ self.outer_weight + self.outer_bias  # (B, H, Lq, b)
        if not positions.per_row:
            return Tiled(inner, outer, positions.key_length)
        return Placed(Tiled(inner, outer, self.max_length), positions.key)  # type: ignore[arg-type]


def default_factors(max_length: int) -> tuple[int, int]:
    """Find a ≥ b with a·b = N, as near to a square as possible. If a/b > 4 for this N, take the next larger N that has a/b ≤ 4."""
    for columns in range(max_length, 2 * max_length + 4):
        b = next(b for b in range(math.isqrt(columns), 0, -1) if columns % b == 0)
        if columns <= 4 * b * b or columns <= 3:
            return columns // b, b
    raise AssertionError("a square lies between N and 2N + 3")
