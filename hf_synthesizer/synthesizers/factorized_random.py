"""Factorized Random Synthesizer: R as a product of two thin matrices (section 3.4.2 of the paper)."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits, LowRank, Static
from ..logits.positions import Positions
from .base import Synthesizer
from .registry import register_variant


@register_variant("factorized_random")
class FactorizedRandomSynthesizer(Synthesizer):
    """`S[h, i, j] = Σ_k R1[h, i, k] · R2[h, j, k]`, with k = `rank`."""

    formula = "Σ_k R1[h, i, k] · R2[h, j, k]"
    parameter_formula = "2·H·N·k"
    options = frozenset({"share_heads", "rank"})
    is_static = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        shape = (self.table_heads, self.max_length, self.config.rank)  # (H or 1, N, k)
        self.query_factor = nn.Parameter(torch.empty(shape))
        self.key_factor = nn.Parameter(torch.empty(shape))
        for factor in (self.query_factor, self.key_factor):
            nn.init.normal_(factor, std=(0.05 / self.config.rank**0.5) ** 0.5)  # the product has std 0.05

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.query_factor)

    def static_table(self) -> torch.Tensor:
        return (self.query_factor @ self.key_factor.transpose(-1, -2)).expand(self.num_heads, -1, -1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        query = positions.queries(self.query_factor)  # (H or 1, Lq, k), or (B, H or 1, Lq, k)
        key = positions.keys(self.key_factor)
        query, key = (factor.expand(*factor.shape[:-3], self.num_heads, -1, -1) for factor in (query, key))
        if not positions.per_row:
            return Static(query, key)
        return LowRank(query.expand(hidden_states.shape[0], -1, -1, -1), key)
