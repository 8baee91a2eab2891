"""Random Synthesizer: one trained matrix of logits a head, whatever the input (section 3.3 of the paper)."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits, Placed, Static
from ..logits.positions import Positions, span
from .base import Synthesizer
from .options import SHARE_HEADS, Option
from .patterns import handcrafted_logits
from .registry import register_variant
from .statistics import Fit, MeanWeights


@register_variant("random")
class RandomSynthesizer(Synthesizer):
    """`S[h, i, j] = R[h, i, j]`, R trained.

    `random` is a table of logits. It is learnt with the rest of the model and is the same for every input. A head can
    learn to look at the next token, at the first token, or at all tokens.
    """

    formula = "R[h, i, j]"
    parameter_formula = "H·N²"
    options = {
        "share_heads": SHARE_HEADS,
        "init": Option(
            "default",
            "near-uniform attention, or seven patterns such as 'next token' in the first heads",
            choices=("default", "handcrafted"),
            in_fingerprint=False,
        ),
    }
    is_static = True
    statistic = MeanWeights

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        table = torch.empty(self.table_heads, self.max_length, self.max_length)  # (H or 1, N, N)
        self.register_table(table)
        nn.init.normal_(self.table, std=0.02)
        if self.config.init == "handcrafted":
            patterns = handcrafted_logits(self.max_length)[: self.table_heads]
            with torch.no_grad():
                self.table[: len(patterns)] = patterns

    def register_table(self, table: torch.Tensor) -> None:
        """Register R as a parameter; `fixed_random` registers a buffer instead."""
        self.table = nn.Parameter(table)

    @property
    def starts_fresh(self) -> bool:
        return self.config.init == "default"

    def fit(self, fit: Fit) -> None:
        """The logits of the mean weights; heads that share a table take the mean over the heads."""
        self.table.copy_(fit.statistic.logits_for(fit, shared=self.table_heads < self.num_heads))

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.table)

    def static_table(self) -> torch.Tensor:
        return self.table.expand(self.num_heads, -1, -1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        table = self.static_table()
        if positions.per_row:
            return Placed(Static(table), positions.key, positions.query)  # type: ignore[arg-type]
        return Static(span(positions.queries(table), 0, positions.key_length, dim=-1))  # (H, Lq, Lk)


@register_variant("fixed_random")
class FixedRandomSynthesizer(RandomSynthesizer):
    """`S[h, i, j] = R[h, i, j]`, R drawn once, saved and never trained.

    `fixed_random` never trains its table. The table stays as it was drawn, or as a transfer set it, to the mean
    attention of the teacher. Use it for comparison: it shows what a model keeps without training its attention.
    """

    parameter_formula = "0"

    def register_table(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table)
