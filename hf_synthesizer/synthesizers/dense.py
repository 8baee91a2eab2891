"""Dense Synthesizer: each token predicts its own row of logits (section 3.2 of the paper)."""

from __future__ import annotations

import torch
from torch import nn

from ..device.matmul import linear
from ..logits.forms import Logits, LowRank
from ..logits.positions import Positions
from .base import Synthesizer
from .options import SHARE_HEADS
from .registry import register_variant
from .statistics import Fit, MeanStates


@register_variant("dense")
class DenseSynthesizer(Synthesizer):
    """`S[h, i, j] = relu(W1 x_i)[h] · W2[h, :, j] + b2[h, j]`.

    Each token i predicts its own row of logits from its hidden state alone. The row does not depend on the token at
    place j.

    The columns of W2 take the place of the keys. They do not depend on any token.
    """

    formula = "relu(W1 x_i)[h] · W2[h, :, j] + b2[h, j]"
    parameter_formula = "d² + d·N"
    options = {"share_heads": SHARE_HEADS}
    statistic = MeanStates
    fitted_rate = 0.2

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.columns = nn.Parameter(torch.empty(self.table_heads, self.max_length, self.head_dim))  # W2ᵀ (H, N, d_h)
        self.bias = nn.Parameter(torch.zeros(self.table_heads, self.max_length))
        nn.init.normal_(self.columns, std=0.02)

    @property
    def logit_width(self) -> int:
        return self.head_dim

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.columns)

    @property
    def can_fit(self) -> bool:
        return self.table_heads == self.num_heads

    def fit(self, fit: Fit) -> None:
        """The logits with the mean key of each position: `W1 = Wq`, `W2[h, :, j] = s · k̄_j`.

        b2 subtracts the bias of the hidden units.
        """
        keys = fit.scales.unsqueeze(-1) * fit.statistic.keys(fit.heads)  # (h, N, d_h)
        offset = fit.statistic.write_queries(self.hidden, fit)
        self.columns.copy_(keys)
        self.bias.copy_(-torch.einsum("hnc,hc->hn", keys, offset))

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        query = self.split_heads(linear(self.hidden, hidden_states).relu())  # (B, H, Lq, d_h)
        key, bias = positions.keys(self.columns), positions.keys(self.bias)
        if not positions.per_row:
            key, bias = key.unsqueeze(0), bias.unsqueeze(0)
        return LowRank(
            query,
            key.expand(-1, self.num_heads, -1, -1),  # (1 or B, H, Lk, d_h)
            bias.expand(-1, self.num_heads, -1),  # (1 or B, H, Lk)
        )
