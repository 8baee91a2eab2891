"""Relative Synthesizer: one trained logit for each distance, whatever the input and its length."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits
from ..logits.positions import Positions
from ..logits.relative import Relative
from .base import Synthesizer
from .distance_statistics import DistanceSums, DistanceWeights
from .options import SHARE_HEADS, Option
from .registry import register_variant
from .statistics import Fit

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

    def distance_logits(self) -> torch.Tensor:
        """The parameter that holds a logit for each distance, (H or 1, columns)."""
        raise TypeError(f"{type(self).__name__} must define distance_logits()")

    @torch.no_grad()
    def match(self, wanted: DistanceSums, found: DistanceSums, alpha: torch.Tensor | None, of_sinks: bool) -> None:
        """One step of iterative scaling: the weight at each distance, or of each sink, becomes nearer to the wanted one.

        The step adds log(wanted / found) to the logits. Distances and sinks take turns, because a pair has a logit of both:
        so the likelihood of the wanted weights never falls.
        """
        nearest, columns = wanted.nearest(), self.columns_of_distances
        if not of_sinks:
            self._add(self.distance_logits(), _ratio(wanted.sums, found.sums)[:, nearest][:, :columns], alpha)
        elif self.sinks is not None:
            self._add(self.sinks, _ratio(wanted.sinks, found.sinks), alpha)

    @staticmethod
    def _add(parameter: torch.Tensor, step: torch.Tensor, alpha: torch.Tensor | None) -> None:
        """Add a step for each head; heads that share the parameter take its mean."""
        if alpha is not None:
            step = step / alpha.double().cpu()[:, None]
        parameter += step.mean(0, keepdim=True) if len(parameter) < len(step) else step

    def at_distances(self, rows: torch.Tensor, positions: Positions) -> Relative:
        """The logits of rows (B or 1, H, Lq or 1, columns)."""
        sinks = None if self.sinks is None else self.sinks.expand(self.num_heads, -1)
        return Relative(rows, positions, self.causal, sinks)


def _ratio(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """log(wanted / found) in [−2, 2]; 0 where nothing is found."""
    tiny = torch.finfo(torch.float32).tiny
    ratio = (wanted.clamp(min=tiny) / found.clamp(min=tiny)).log().clamp(-2.0, 2.0)
    return ratio.masked_fill(found <= tiny, 0.0)


@register_variant("relative")
class RelativeSynthesizer(DistanceSynthesizer):
    """`S[h, i, j] = T[h, clip(j − i, −D, D)] + F[h, j]`, F for the first `sinks` tokens of a row.

    `relative` is a table of logits by distance. A head can learn to look at the next token, at the tokens around it, or
    at the first tokens. It needs no `max_length` and takes sequences of any length.

    F starts at 0. In a causal layer T has the distances −D … 0.
    """

    formula = "T[h, clip(j − i, −D, D)] + F[h, j]"
    parameter_formula = "H·(2·D + 1 + s)"
    statistic = DistanceWeights

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

    def distance_logits(self) -> torch.Tensor:
        return self.table

    def fit(self, fit: Fit) -> None:
        """The logarithm of the mean weight at each distance. `match` makes it exact."""
        logits = fit.statistic.logits()[list(fit.heads)]
        if fit.alpha is not None:
            logits = logits / fit.alpha.double().cpu()[:, None]
        if self.table_heads < self.num_heads:
            logits = logits.mean(0, keepdim=True)
        self.table.copy_(logits[:, : self.columns_of_distances])
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        return self.at_distances(self.table.expand(self.num_heads, -1)[None, :, None], positions)
