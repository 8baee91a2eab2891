"""Relative Dense Synthesizer: each token predicts its own row of logits by distance."""

from __future__ import annotations

import torch
from torch import nn

from ..device.matmul import linear
from ..logits.forms import Logits
from ..logits.positions import Positions
from .distance_statistics import DistanceKeys
from .registry import register_variant
from .relative import DistanceSynthesizer
from .statistics import Fit


@register_variant("relative_dense")
class RelativeDenseSynthesizer(DistanceSynthesizer):
    """`S[h, i, j] = relu(W1 x_i)[h] · W2[h, :, clip(j − i, −D, D)] + b2[h, clip(j − i, −D, D)] + F[h, j]`.

    `relative_dense` predicts a row of logits by distance from the hidden state of each token: how far the token looks,
    and in which direction. It needs no `max_length` and takes sequences of any length.

    F is for the first `sinks` tokens of a row, and starts at 0. In a causal layer W2 and b2 have the distances −D … 0.
    """

    formula = "relu(W1 x_i)[h] · W2[h, :, clip(j − i, −D, D)] + b2[h, clip(j − i, −D, D)] + F[h, j]"
    parameter_formula = "d² + d·(2·D + 1) + H·s"
    statistic = DistanceKeys
    fitted_rate = 0.2

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        columns = self.columns_of_distances
        self.hidden = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.columns = nn.Parameter(
            torch.empty(self.table_heads, columns, self.head_dim)
        )  # W2ᵀ (H or 1, columns, d_h)
        self.bias = nn.Parameter(torch.zeros(self.table_heads, columns))
        nn.init.normal_(self.columns, std=0.02)
        self.make_sinks()

    def set_causal(self, causal: bool) -> None:
        super().set_causal(causal)
        if causal:
            self.columns = nn.Parameter(self.columns.detach()[:, : self.columns_of_distances].clone())
            self.bias = nn.Parameter(self.bias.detach()[:, : self.columns_of_distances].clone())

    @property
    def token_products(self) -> int:
        return super().token_products + self.num_heads * self.head_dim * self.columns_of_distances

    def distance_logits(self) -> torch.Tensor:
        return self.bias

    @property
    def can_fit(self) -> bool:
        return self.table_heads == self.num_heads

    def fit(self, fit: Fit) -> None:
        """`W1 = Wq`, and `W2 = s · k̄` with the mean key at each distance. `match` then chooses b2 and F."""
        keys = (fit.scales.unsqueeze(-1) * fit.statistic.keys(fit.heads))[:, : self.columns_of_distances]
        offset = fit.statistic.write_queries(self.hidden, fit)  # (h, d_h)
        logits = fit.statistic.weights.logits()[list(fit.heads)][:, : self.columns_of_distances]
        mean, _ = fit.statistic.query_mean_and_deviation()
        mean = fit.statistic.of_heads(mean, fit.heads)
        self.columns.copy_(keys)
        # The mean over all queries is that of the mean weights.
        self.bias.copy_(logits - torch.einsum("hnc,hc->hn", keys, offset if fit.beside_keys else offset + mean))
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.columns)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        hidden = self.split_heads(linear(self.hidden, hidden_states).relu())  # (B, H, Lq, d_h)
        rows = hidden @ self.columns.expand(self.num_heads, -1, -1).transpose(-1, -2)  # (B, H, Lq, columns)
        return self.at_distances(rows + self.bias.expand(self.num_heads, -1)[:, None], positions)
