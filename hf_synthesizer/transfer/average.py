"""The closed form of tables: the constant attention nearest to the teacher's."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..synthesizers import (
    DotProductSynthesizer,
    FactorizedRandomSynthesizer,
    MixtureSynthesizer,
    RandomSynthesizer,
    Synthesizer,
)
from .observe import Call, Learner

TABLES = (RandomSynthesizer, FactorizedRandomSynthesizer)
"""The synthesizers that hold one matrix of logits a head, whatever the input."""


class MeanWeights:
    """The constant attention nearest to a layer's, over the valid pairs (i, j) of all sequences seen.

    A pair is valid where i is a token and may look at j. Padding is on the right, so that a shorter sequence has the first of
    the keys that a longer one has, and constant logits, masked, are the longer one's weights divided by their sum over these keys.
    So what a mean over all sequences says of a key depends on how many keys each of them had; the share
    `q[h, i, j] = Σ_b weights[b, h, i, j] / Σ_b Σ_{k ≤ j} weights[b, h, i, k]`, both over the sequences that have j, does not.
    """

    def __init__(self, num_heads: int, max_length: int):
        self.sum = torch.zeros(num_heads, max_length, max_length, dtype=torch.float64)
        self.before = torch.zeros_like(self.sum)  # Σ_b Σ_{k < j} weights, over the sequences that have j
        self.count = torch.zeros(max_length, max_length, dtype=torch.float64)
        self.bias: torch.Tensor | None = None

    def add(self, call: Call) -> None:
        """Count in one batch, padded on the right."""
        length = min(call.weights.shape[-1], self.sum.shape[-1])
        valid = call.pairs[:, :length, :length]
        weights = call.weights[..., :length, :length].double() * valid.unsqueeze(1)
        self.sum[:, :length, :length] += weights.sum(0).cpu()
        before = nn.functional.pad(weights.cumsum(-1)[..., :-1], (1, 0))
        self.before[:, :length, :length] += (before * valid.unsqueeze(1)).sum(0).cpu()
        self.count[:length, :length] += valid.sum(0).cpu()
        if call.position_bias is not None and (self.bias is None or length > self.bias.shape[-1]):
            self.bias = call.position_bias[0, :, :length, :length].double().cpu()

    def log(self) -> torch.Tensor:
        """The logits R, (H, N, N), that in a masked softmax diverge least from the weights: `R_j = log q_j + Σ_{k > j} log(1 − q_k)`.

        A masked softmax of R gives key j of the keys up to j the share q_j, whatever the length is, and these shares are what
        the likelihood of the weights falls apart into. Where all sequences have the same keys R is the logarithm of the mean weight
        (Hassid et al. 2022, arXiv 2211.03495).

        A pair that no sequence reached takes the mean of its diagonal j − i, or of the nearest diagonal that was
        reached, so that sequences longer than any seen go on as the shorter ones did.
        """
        tiny = torch.finfo(torch.float32).tiny
        reached = self.count > 0
        total = (self.sum + self.before).clamp(min=tiny)
        rest = (self.before / total).clamp(min=tiny).log().masked_fill(~reached, 0.0)  # log(1 − q)
        later = nn.functional.pad(rest.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))  # Σ_{k > j}
        logits = ((self.sum / total).clamp(min=tiny).log() + later).clamp(min=math.log(tiny))
        return torch.where(reached, logits, _diagonals(self.sum, self.count).clamp(min=tiny).log())

    def log_without_bias(self, heads: Sequence[int], shared: bool = False) -> torch.Tensor:
        """`log(mean) − position bias` of some heads, (h, N, N), for models that add a bias of their own to the logits (T5).

        With `shared` it is (1, N, N): of the mean over these heads.
        """
        logits = self.log()
        bias = torch.zeros_like(logits)
        if self.bias is not None:
            length = self.bias.shape[-1]
            known = torch.zeros_like(self.count)
            known[:length, :length] = 1
            bias[:, :length, :length] = self.bias
            bias = torch.where(known > 0, bias, _diagonals(bias, known))
        logits, bias = logits[list(heads)], bias[list(heads)]
        if shared:
            return logits.exp().mean(0, keepdim=True).log() - bias.mean(0, keepdim=True)
        return logits - bias


def _diagonals(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """At each (i, j) the mean over the whole diagonal j − i: (H, N, N)."""
    length = count.shape[-1]
    index = torch.arange(length)
    diagonal = (index[None, :] - index[:, None] + length - 1).flatten()  # j − i, counted from 0
    sums = total.new_zeros(len(total), 2 * length - 1).index_add_(1, diagonal, total.flatten(1))
    counts = count.new_zeros(2 * length - 1).index_add_(0, diagonal, count.flatten())
    seen = counts.nonzero().squeeze(-1)
    if not len(seen):
        return torch.ones_like(total)
    nearest = seen[(torch.arange(2 * length - 1)[:, None] - seen[None, :]).abs().argmin(-1)]
    means = (sums / counts.clamp(min=1))[:, nearest]  # (H, 2N − 1)
    return means[:, diagonal].view_as(total)


def tables_of(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts that take the teacher's mean weights.

    None beside `dot_product`, which has the teacher's weights already.
    """
    if keeps_dot_product(synthesizer):
        return []
    return [part for part in parts_of(synthesizer) if isinstance(part, TABLES)]


def parts_of(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts of a mixture, or the one synthesizer itself."""
    if isinstance(synthesizer, MixtureSynthesizer):
        return [part for _, part in synthesizer.components()]
    return [synthesizer]


def write_mean_weights(learner: Learner, means: MeanWeights, less: torch.Tensor | None = None) -> None:
    """Give the first table the logarithm of the mean weights of its heads, less what another part says on the mean.

    `random` takes it as it is; heads that share a table take the mean over the heads. `factorized_random` takes the best
    approximation of its rank, in the sense of least squares and up to a constant a row, which softmax does not see.
    """
    synthesizer = learner.synthesizer
    table = tables_of(synthesizer)[0]
    logits = means.log_without_bias(learner.heads, shared=table.config.share_heads)
    if less is not None:
        logits = logits - (less.mean(0, keepdim=True) if table.config.share_heads else less)
    if isinstance(synthesizer, MixtureSynthesizer):
        alpha = synthesizer.alpha().get(table.variant)
        if alpha is not None and table.table_heads == len(alpha):
            logits = logits / alpha.detach().double().cpu()[:, None, None]
    with torch.no_grad():
        if isinstance(table, RandomSynthesizer):
            table.table.copy_(logits)
        elif isinstance(table, FactorizedRandomSynthesizer):
            query, key = best_factors(logits, table.config.rank)
            nn.init.zeros_(table.query_factor)
            nn.init.zeros_(table.key_factor)
            table.query_factor[..., : query.shape[-1]] = query.to(table.query_factor)
            table.key_factor[..., : key.shape[-1]] = key.to(table.key_factor)


def best_factors(logits: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(H, N, k) and (H, N, k) whose product is nearest to the logits (H, N, N) less their row means."""
    centred = logits - logits.mean(-1, keepdim=True)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    root = values[:, None, :rank].sqrt()
    return left[..., :rank] * root, right[:, :rank].transpose(-1, -2) * root


def keeps_dot_product(synthesizer: Synthesizer) -> bool:
    """Whether the stock layer's own logits are a part."""
    return any(isinstance(part, DotProductSynthesizer) for part in parts_of(synthesizer))


def restore_dot_product(synthesizer: Synthesizer) -> None:
    """Make a mixture with `dot_product` exactly the stock attention: the other parts start at zero, and the query
    projection is divided by the weight α that the softmax over the parts gives it.
    """
    if not isinstance(synthesizer, MixtureSynthesizer) or not keeps_dot_product(synthesizer):
        return
    synthesizer.start_at_zero()
    alpha = synthesizer.alpha().get("dot_product")
    if alpha is None:
        return
    part = cast(DotProductSynthesizer, synthesizer.parts["dot_product"])
    query = copy.deepcopy(part.query)  # the stock layer, kept for unpatch_model, has the old one
    scale = alpha.detach().repeat_interleave(part.head_dim)
    with torch.no_grad():
        for parameter in query.parameters():  # weight (H·d_h, d), bias (H·d_h)
            parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)).to(parameter))
    part.query = query
