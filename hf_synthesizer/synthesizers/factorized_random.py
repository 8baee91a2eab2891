"""Factorized Random Synthesizer: R as a product of two thin matrices (section 3.4.2 of the paper)."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits, LowRank, Static
from ..logits.positions import Positions
from .base import Synthesizer
from .options import SHARE_HEADS, Option
from .registry import register_variant
from .statistics import Fit, MeanWeights


@register_variant("factorized_random")
class FactorizedRandomSynthesizer(Synthesizer):
    """`S[h, i, j] = Σ_k R1[h, i, k] · R2[h, j, k]`, with k = `rank`.

    `factorized_random` is the product of two thin factors of rank k, with 2·N·k numbers for each head instead of N².
    """

    formula = "Σ_k R1[h, i, k] · R2[h, j, k]"
    parameter_formula = "2·H·N·k"
    options = {"share_heads": SHARE_HEADS, "rank": Option(8, "the rank k", most=8_192)}
    is_static = True
    statistic = MeanWeights

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        shape = (self.table_heads, self.max_length, self.config.rank)  # (H or 1, N, k)
        self.query_factor = nn.Parameter(torch.empty(shape))
        self.key_factor = nn.Parameter(torch.empty(shape))
        for factor in (self.query_factor, self.key_factor):
            nn.init.normal_(factor, std=(0.05 / self.config.rank**0.5) ** 0.5)  # the product has std 0.05

    @property
    def logit_width(self) -> int:
        return self.config.rank

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.query_factor)

    def fit(self, fit: Fit) -> None:
        """The best approximation of this rank to the logits of the mean weights, by least squares."""
        logits = fit.statistic.logits_for(fit, shared=self.table_heads < self.num_heads)
        for factor, best in zip(
            (self.query_factor, self.key_factor), best_factors(logits, self.config.rank), strict=True
        ):
            nn.init.zeros_(factor)
            factor[..., : best.shape[-1]] = best.to(factor)

    def static_table(self) -> torch.Tensor:
        return (self.query_factor @ self.key_factor.transpose(-1, -2)).expand(self.num_heads, -1, -1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        query = positions.queries(self.query_factor)  # (H or 1, Lq, k), or (B, H or 1, Lq, k)
        key = positions.keys(self.key_factor)
        query, key = (factor.expand(*factor.shape[:-3], self.num_heads, -1, -1) for factor in (query, key))
        if not positions.per_row:
            return Static(query, key)
        return LowRank(query.expand(hidden_states.shape[0], -1, -1, -1), key)


def best_factors(logits: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two factors (H, N, k) whose product is nearest to the logits (H, N, N) minus their row means.

    Softmax ignores a constant per row.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    root = values[:, None, :rank].sqrt()
    return left[..., :rank] * root, right[:, :rank].transpose(-1, -2) * root
