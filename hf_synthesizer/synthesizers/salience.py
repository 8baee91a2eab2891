"""Salience: one logit for each key, the same for all queries. A part for mixtures."""

from __future__ import annotations

import torch
from torch import nn

from ..device.matmul import linear
from ..logits.forms import KeyBias, Logits
from ..logits.positions import Positions
from .base import Synthesizer
from .registry import register_variant
from .statistics import Fit, MeanStates


@register_variant("salience")
class SalienceSynthesizer(Synthesizer):
    """`S[h, i, j] = u[h] · x_j`, the scalar form of the Attention Free Transformer's key term (arXiv 2105.14103).

    `salience` is not in the paper. It predicts how much all queries look at token j. Use it as a part of a mixture,
    such as `dense+salience`; it is cheap. Under `mixing="softmax"` it does not compete with the other parts: its
    weight is 1.

    No bias: it would not change the softmax.
    """

    formula = "u[h] · x_j"
    has_any_length = True
    parameter_formula = "d·H"
    key_side = True
    statistic = MeanStates

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.worth = nn.Linear(self.hidden_size, self.num_heads, bias=False)
        nn.init.normal_(self.worth.weight, std=0.02 * self.hidden_size**-0.5)

    @property
    def key_width(self) -> int:
        return 1

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.worth.weight)

    def fit(self, fit: Fit) -> torch.Tensor:
        """The logits with the mean query in place of the query: `u[h] = s · Wk[h]ᵀ q̄[h]`."""
        mean = fit.statistic.salience(fit.heads)  # (h, d)
        self.worth.weight.copy_(fit.scales * mean)
        return (fit.scales * (mean @ fit.statistic.positions().T)).unsqueeze(1)  # (h, 1, N)

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.split_heads(linear(self.worth, hidden_states))  # (B, H, L, 1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        assert key_states is not None  # `project_keys` made them
        return KeyBias(key_states.transpose(-1, -2), positions.query_length)  # (B, H, 1, Lk)
