"""Relative Synthesizer: one trained logit for each distance, whatever the input and its length."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits
from ..logits.positions import Positions
from ..logits.relative import Relative
from .base import Synthesizer
from .options import SHARE_HEADS, Option
from .registry import register_variant

MAX_DISTANCE = Option(128, "the distance D beyond which all keys on a side share one logit", most=65_536)


class DistanceSynthesizer(Synthesizer):
    """What the variants by distance share: the columns of distances, and logits of the first tokens."""

    options = {"max_distance": MAX_DISTANCE, "share_heads": SHARE_HEADS}
    has_any_length = True

    @property
    def columns_of_distances(self) -> int:
        """2·D + 1 distances, or D + 1 in a causal layer, whose queries see the past alone."""
        furthest = self.config.max_distance
        return furthest + 1 if self.causal else 2 * furthest + 1

    def make_sinks(self) -> None:
        """Make F, (H or 1, s): the logits that the first tokens of a row get in addition. They start at 0."""
        self.sinks = nn.Parameter(torch.zeros(self.table_heads, self.config.sinks)) if self.config.sinks else None

    def at_distances(self, rows: torch.Tensor, positions: Positions) -> Relative:
        """The logits of rows (B or 1, H, Lq or 1, columns)."""
        sinks = None if self.sinks is None else self.sinks.expand(self.num_heads, -1)
        return Relative(rows, positions, self.causal, sinks)


@register_variant("relative")
class RelativeSynthesizer(DistanceSynthesizer):
    """`S[h, i, j] = T[h, clip(j − i, −D, D)] + F[h, j]`, F for the first `sinks` tokens of a row.

    `relative` is a table of logits by distance. A head can learn to look at the next token, at the tokens around it, or at the
    first tokens. It has no `max_length` and takes sequences of any length.

    F starts at 0. In a causal layer T has the distances −D … 0.
    """

    formula = "T[h, clip(j − i, −D, D)] + F[h, j]"
    parameter_formula = "H·(2·D + 1 + s)"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = nn.Parameter(torch.empty(self.table_heads, self.columns_of_distances))  # T, (H or 1, columns)
        nn.init.normal_(self.table, std=0.02)
        self.make_sinks()

    def set_causal(self, causal: bool) -> None:
        super().set_causal(causal)
        if causal:
            self.table = nn.Parameter(self.table.detach()[:, : self.columns_of_distances].clone())

    def start_at_zero(self) -> None:
        nn.init.zeros_(self.table)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        return self.at_distances(self.table.expand(self.num_heads, -1)[None, :, None], positions)
