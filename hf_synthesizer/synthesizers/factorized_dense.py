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
from .config import SynthesizerConfig
from .options import SHARE_HEADS, Option
from .registry import register_variant
from .statistics import Fit, MeanStates


@register_variant("factorized_dense")
class FactorizedDenseSynthesizer(Synthesizer):
    """`S[h, i, j] = A[h, i, j mod a] · B[h, i, j div a]` with `A, B = relu(W1 x_i)[h] · WA[h], … · WB[h]`.

    `factorized_dense` predicts two short rows, of a and of b numbers with a·b ≥ N, and multiplies them. One row
    chooses a block of a places, the other a place inside the block.

    One factor tiles and the other repeats, so that all a·b ≥ N columns are different.
    """

    formula = "A[h, i, j mod a] · B[h, i, j div a], A = relu(W1 x_i)[h] · WA[h], B = relu(W1 x_i)[h] · WB[h]"
    parameter_formula = "d² + d·(a + b)"
    options = {
        "share_heads": SHARE_HEADS,
        "factors": Option(None, "the pair (a, b), a·b ≥ N; default: the pair nearest to a square", kind=tuple),
    }
    statistic = MeanStates
    constants = (1.0, 1.5, 2.0)
    """A larger constant leaves less of the unwanted product, but loses precision in narrow dtypes, and makes each
    training step as many times larger."""
    fitted_rate = 0.2

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        a, b = self.factors = self.config.factors or default_factors(self.max_length)
        require_columns(self.factors, self.max_length)
        self.hidden = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.inner_weight = nn.Parameter(torch.empty(self.table_heads, self.head_dim, a))  # WA
        self.inner_bias = nn.Parameter(torch.zeros(self.table_heads, 1, a))
        self.outer_weight = nn.Parameter(torch.empty(self.table_heads, self.head_dim, b))  # WB
        self.outer_bias = nn.Parameter(torch.zeros(self.table_heads, 1, b))
        for weight in (self.inner_weight, self.outer_weight):
            nn.init.normal_(weight, std=0.5 * self.head_dim**-0.5)

    @property
    def token_products(self) -> int:
        return super().token_products + self.num_heads * self.head_dim * sum(self.factors)

    def start_at_zero(self) -> None:
        # One factor alone: if both were 0, the gradient of both would be 0.
        nn.init.zeros_(self.inner_weight)

    @classmethod
    def require_options(cls, config: SynthesizerConfig) -> None:
        if config.factors and config.max_length:
            require_columns(config.factors, config.max_length)

    @property
    def can_fit(self) -> bool:
        return self.table_heads == self.num_heads

    def fit(self, fit: Fit) -> None:
        """A product that is near to `(hidden_i − t) · key_j`, `dense`'s closed form.

        With a constant c in each factor, the product contains a sum:

            (c + u_m/c) (c + v_n/c) = c² + u_m + v_n + u_m·v_n / c²

        Softmax ignores c², and the last term is small if c is large. Least squares split the keys into a
        fine part by j mod a and a coarse part by j div a: `key_j ≈ F[j mod a] + G[j div a]`. Then
        `u = (hidden − t) · F` and `v = (hidden − t) · G`.
        """
        keys = fit.scales.unsqueeze(-1) * fit.statistic.keys(fit.heads)  # (h, N, d_h)
        offset = fit.statistic.write_queries(self.hidden, fit)  # t
        fine, coarse = fine_and_coarse(keys, fit.statistic.count.squeeze(-1), self.factors)
        constant = fit.constants[:, None, None]
        for part, weight, bias in (
            (fine, self.inner_weight, self.inner_bias),
            (coarse, self.outer_weight, self.outer_bias),
        ):
            weight.copy_(part.transpose(-1, -2) / constant)
            bias.copy_(constant - torch.einsum("hnc,hc->hn", part, offset).unsqueeze(1) / constant)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        hidden = self.split_heads(linear(self.hidden, hidden_states).relu())  # (B, H, Lq, d_h)
        inner = hidden @ self.inner_weight + self.inner_bias  # (B, H, Lq, a)
        outer = hidden @ self.outer_weight + self.outer_bias  # (B, H, Lq, b)
        if not positions.per_row:
            return Tiled(inner, outer, positions.key_length)
        return Placed(Tiled(inner, outer, self.max_length), positions.key)  # type: ignore[arg-type]


def require_columns(factors: tuple[int, int], max_length: int) -> None:
    """Raise `InvalidConfigError` if the factors give fewer columns than there are positions."""
    a, b = factors
    if a * b < max_length:
        raise InvalidConfigError(
            f"factors=({a}, {b}) give a·b = {a * b} columns, but max_length = {max_length} positions need as many. Choose a "
            f"and b with a·b ≥ {max_length}, or leave factors out: the default is {default_factors(max_length)}."
        )


def default_factors(max_length: int) -> tuple[int, int]:
    """Find a ≥ b with a·b = N, as near to a square as possible.

    If a/b > 4 for this N, take the next larger N that has a/b ≤ 4.
    """
    for columns in range(max_length, 2 * max_length + 4):
        b = next(b for b in range(math.isqrt(columns), 0, -1) if columns % b == 0)
        if columns <= 4 * b * b or columns <= 3:
            return columns // b, b
    raise AssertionError("a square lies between N and 2N + 3")


def fine_and_coarse(
    keys: torch.Tensor, count: torch.Tensor, factors: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """F (h, a, d_h) and G (h, b, d_h) with `key_j ≈ F[j mod a] + G[j div a]`, by least squares.

    Positions that do not occur have no weight.
    """
    a, b = factors
    position = torch.arange(keys.shape[1])
    design = torch.zeros(keys.shape[1], a + b, dtype=keys.dtype)  # (N, a + b)
    design[position, position % a] = 1
    design[position, a + position // a] = 1
    weight = (count / count.sum().clamp(min=1)).sqrt().unsqueeze(-1)
    centred = keys - (keys * weight.square()).sum(1, keepdim=True)  # softmax ignores a constant
    parts = torch.linalg.pinv(design * weight) @ (centred * weight)  # (h, a + b, d_h)
    return parts[:, :a], parts[:, a:]
