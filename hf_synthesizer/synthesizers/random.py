"""Random Synthesizer: one trained matrix of logits a head, whatever the input (section 3.3 of the paper)."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits, Placed, Static
from ..logits.positions import Positions, span
from .base import Synthesizer
from .patterns import handcrafted_logits
from .registry import register_variant


@register_variant("random")
class RandomSynthesizer(Synthesizer):
    """`S[h, i, j] = R[h, i, j]`, R trained."""

    formula = "R[h, i, j]"
    parameter_formula = "H·N²"
    options = frozenset({"share_heads", "init"})
    is_static = True

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
    """`S[h, i, j] = R[h, i, j]`, R drawn once, saved and never trained."""

    parameter_formula = "0"

    def register_table(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table)
