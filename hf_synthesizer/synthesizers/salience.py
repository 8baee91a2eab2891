"""Salience: one logit for each key, the same for all queries. A part for mixtures."""

from __future__ import annotations

import torch
from torch import nn

from ..device.matmul import linear
from ..logits.forms import KeyBias, Logits
from ..logits.positions import Positions
from .base import Synthesizer
from .registry import register_variant


@register_variant("salience")
class SalienceSynthesizer(Synthesizer):
    """`S[h, i, j] = u[h] · x_j`, the scalar form of the Attention Free Transformer's key term (arXiv 2105.14103).

    No bias: it would not change the softmax.
    """

    formula = "u[h] · x_j"
    parameter_formula = "d·H"
    key_side = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.worth = nn.Linear(self.hidden_size, self.num_heads, bias=False)
        nn.init.normal_(self.worth.weight, std=0.02 * self.hidden_size**-0.5)

    @property
    def key_width(self) -> int:
        return 1

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.worth.weight)

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.split_heads(linear(self.worth, hidden_states))  # (B, H, L, 1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        assert key_states is not None  # `project_keys` made them
        return KeyBias(key_states.transpose(-1, -2), positions.query_length)  # (B, H, 1, Lk)
