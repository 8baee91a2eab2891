"""What a closed form by distance knows of the teacher: weights and keys at each distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .statistics import MeanStates, Statistic, TeacherCall, TeacherLayer


class DistanceSums(NamedTuple):
    """Attention weights of pairs, summed.

    `sums` (H, 2·D + 1) and `counts` (2·D + 1) are over the pairs (i, j) of each distance clip(j − i, −D, D). `sinks`
    (H, s) are over the queries that see each of the first tokens.
    """

    sums: torch.Tensor
    counts: torch.Tensor
    sinks: torch.Tensor

    @classmethod
    def of(cls, weights: torch.Tensor, pairs: torch.Tensor, max_distance: int, sinks: int) -> DistanceSums:
        """The sums of weights (B, H, L, L) over the valid pairs (B, L, L)."""
        length = weights.shape[-1]
        total = torch.einsum("bhij,bij->hij", weights.float(), pairs.float()).double().cpu()
        index = torch.arange(length)
        column = (index - index[:, None]).clamp(-max_distance, max_distance) + max_distance
        columns = 2 * max_distance + 1
        sums = total.new_zeros(len(total), columns).index_add_(1, column.flatten(), total.flatten(1))
        counts = total.new_zeros(columns).index_add_(0, column.flatten(), pairs.sum(0).double().cpu().flatten())
        first = nn.functional.pad(total[:, :, :sinks].sum(1), (0, max(0, sinks - length)))
        return cls(sums, counts, first)

    def plus(self, other: DistanceSums) -> DistanceSums:
        return DistanceSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def nearest(self) -> torch.Tensor:
        """For each distance the nearest one that occurs: (2·D + 1)."""
        occurring = self.counts.nonzero().squeeze(-1)
        index = torch.arange(len(self.counts))
        if not len(occurring):
            return index
        return occurring[(index[:, None] - occurring[None, :]).abs().argmin(-1)]


class DistanceWeights(Statistic):
    """The mean attention weight at each distance."""

    def __init__(self, layer: TeacherLayer):
        super().__init__(layer)
        self.total: DistanceSums | None = None

    def add(self, call: TeacherCall) -> None:
        """Add one call."""
        sums = DistanceSums.of(
            call.weights, call.pairs, self.layer.options["max_distance"], self.layer.options["sinks"]
        )
        self.total = sums if self.total is None else self.total.plus(sums)

    def logits(self) -> torch.Tensor:
        """The logarithm of the mean weights, (H, 2·D + 1). A distance that does not occur takes the nearest one's."""
        assert self.total is not None
        sums, counts, _ = self.total
        mean = (sums / counts.clamp(min=1)).clamp(min=torch.finfo(torch.float32).tiny)
        return mean.log()[:, self.total.nearest()]


class DistanceKeys(MeanStates):
    """The mean key at each distance, and mean and variance of the queries.

    Models such as Llama rotate queries and keys by their positions. With the rotation R of a distance, a stock logit is

        s · (R_i q_i) · (R_j k_j) = s · q_i · R_(j−i) k_j

    With the mean key k̄ of all tokens but the first ones, the first term is `s · q_i · R_(j−i) k̄`: each token predicts
    a row of logits by distance. Without rotations, keys differ between distances only as far as positions do.
    """

    knows_rotations = True

    def __init__(self, layer: TeacherLayer):
        super().__init__(layer)
        self.weights = DistanceWeights(layer)
        furthest = layer.options["max_distance"]
        self.state_sums = torch.zeros(2 * furthest + 1, layer.hidden_size, dtype=torch.float64)
        self.state_counts = torch.zeros(2 * furthest + 1, 1, dtype=torch.float64)
        self.rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosine and sine of each position from 0 on, (L, r)."""

    @torch.no_grad()
    def add(self, call: TeacherCall) -> None:
        """Add one batch, padded on the right."""
        super().add(call)
        self.weights.add(call)
        if call.rotation is not None and (self.rotation is None or len(call.rotation[0]) > len(self.rotation[0])):
            self.rotation = (call.rotation[0].double().cpu(), call.rotation[1].double().cpu())
        furthest, states = self.layer.options["max_distance"], call.hidden_states.double().cpu()
        index = torch.arange(call.rows.shape[-1])
        column = (index - index[:, None]).clamp(-furthest, furthest) + furthest  # (L, L)
        for row, pairs in zip(states, call.pairs.double().cpu(), strict=True):
            times = torch.zeros(len(self.state_sums), len(index), dtype=torch.float64)
            times.scatter_add_(0, column, pairs)  # how often key j is at each distance
            self.state_sums += times @ row
            self.state_counts += times.sum(-1, keepdim=True)

    def keys(self, heads: Sequence[int]) -> torch.Tensor:
        """`s · k̄` at each distance for these heads, (h, 2·D + 1, d_h); rotated where the teacher rotates."""
        weight = self.key.weight.double().cpu()
        bias = None if self.key.bias is None else self.key.bias.double().cpu()
        furthest = self.layer.options["max_distance"]
        if self.rotation is None:
            states = self.state_sums / self.state_counts.clamp(min=1)
            states = states[self.weights.total.nearest()]  # type: ignore[union-attr]
            keys = self.of_heads(nn.functional.linear(states, weight, bias).T, heads).transpose(-1, -2)
            return self.layer.scaling * keys
        sinks = self.layer.options["sinks"]
        state = self.sum[sinks:].sum(0) / self.count[sinks:].sum().clamp(min=1)
        key = self.of_heads(nn.functional.linear(state, weight, bias), heads)  # (h, d_h)
        distance = torch.arange(-furthest, furthest + 1).clamp(1 - len(self.rotation[0]), len(self.rotation[0]) - 1)
        cosine = self.rotation[0][distance.abs()]
        sine = self.rotation[1][distance.abs()] * distance.sign()[:, None]
        return self.layer.scaling * rotated(key[:, None], cosine, sine)

    def of_heads(self, rows: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Select heads; heads that share keys have the same ones."""
        if rows.shape[0] < self.layer.num_heads * self.layer.head_dim:
            groups = rows.unflatten(0, (-1, self.layer.head_dim))
            return groups.repeat_interleave(self.layer.num_heads // len(groups), dim=0)[list(heads)]
        return super().of_heads(rows, heads)


def rotated(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Vectors (…, d_h) rotated by angles (…, r), r ≤ d_h, as Llama does: number c together with number c + r / 2."""
    width = cosine.shape[-1]
    turned, rest = vectors[..., :width], vectors[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cosine + half * sine
    return torch.cat((turned, rest.expand(*turned.shape[:-1], -1)), dim=-1)
