"""The closed form of `random` and `factorized_random`: the constant attention nearest to the teacher's."""

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
"""The synthesizers with one matrix of logits for each head, whatever the input."""


class MeanWeights:
    """The constant attention nearest to a layer's, over the valid pairs (i, j) of all sequences seen.

    A pair is valid if i is a token and may attend to j. Padding is on the right, so all sequences start at key 0. Under a mask,
    constant logits give a shorter sequence the weights of a longer one, divided by their sum over its own keys. A mean of
    weights would depend on the lengths of the sequences: each weight is smaller in a longer sequence. This share does not:

        q[h, i, j] = Σ_b weights[b, h, i, j] / Σ_b Σ_{k ≤ j} weights[b, h, i, k]

    Both sums run over the sequences b that have key j.
    """

    def __init__(self, num_heads: int, max_length: int):
        self.sum = torch.zeros(num_heads, max_length, max_length, dtype=torch.float64)
        self.before = torch.zeros_like(self.sum)  # Σ_b Σ_{k < j} weights, over the sequences that have j
        self.count = torch.zeros(max_length, max_length, dtype=torch.float64)
        self.bias: torch.Tensor | None = None

    def add(self, call: Call) -> None:
        """Add one batch, padded on the right."""
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
        """The logits R, (H, N, N), whose masked softmax has the least KL divergence from the weights.

            R_j = log q_j + Σ_{k > j} log(1 − q_k)

        In a masked softmax of R, key j has the share q_j of the keys up to j, at any length. The likelihood of the weights is a
        product over these shares. If all sequences have the same keys, R is the logarithm of the mean weights (Hassid et
        al. 2022, arXiv 2211.03495).

        A pair that occurs in no sequence takes the mean of its diagonal j − i, or of the nearest diagonal that occurs. So
        a longer sequence continues the pattern of the shorter ones.
        """
        tiny = torch.finfo(torch.float32).tiny
        occurs = self.count > 0
        total = (self.sum + self.before).clamp(min=tiny)
        rest = (self.before / total).clamp(min=tiny).log().masked_fill(~occurs, 0.0)  # log(1 − q)
        later = nn.functional.pad(rest.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))  # Σ_{k > j}
        logits = ((self.sum / total).clamp(min=tiny).log() + later).clamp(min=math.log(tiny))
        return torch.where(occurs, logits, _diagonal_means(self.sum, self.count).clamp(min=tiny).log())

    def log_without_bias(self, heads: Sequence[int], shared: bool = False) -> torch.Tensor:
        """`log() − position bias` for these heads, (h, N, N): some models add a position bias to the logits (T5).

        With `shared`, the result has the mean over these heads, (1, N, N).
        """
        logits = self.log()
        bias = torch.zeros_like(logits)
        if self.bias is not None:
            length = self.bias.shape[-1]
            has_bias = torch.zeros_like(self.count)
            has_bias[:length, :length] = 1
            bias[:, :length, :length] = self.bias
            bias = torch.where(has_bias > 0, bias, _diagonal_means(bias, has_bias))
        logits, bias = logits[list(heads)], bias[list(heads)]
        if shared:
            return logits.exp().mean(0, keepdim=True).log() - bias.mean(0, keepdim=True)
        return logits - bias


def _diagonal_means(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """At each (i, j) the mean of its diagonal j − i, or of the nearest one that occurs: (H, N, N)."""
    length = count.shape[-1]
    index = torch.arange(length)
    diagonal = (index[None, :] - index[:, None] + length - 1).flatten()  # j − i, counted from 0
    sums = total.new_zeros(len(total), 2 * length - 1).index_add_(1, diagonal, total.flatten(1))
    counts = count.new_zeros(2 * length - 1).index_add_(0, diagonal, count.flatten())
    occurring = counts.nonzero().squeeze(-1)
    if not len(occurring):
        return torch.ones_like(total)
    nearest = occurring[(torch.arange(2 * length - 1)[:, None] - occurring[None, :]).abs().argmin(-1)]
    means = (sums / counts.clamp(min=1))[:, nearest]  # (H, 2N − 1)
    return means[:, diagonal].view_as(total)


def table_parts(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts that take the teacher's mean weights.

    Beside `dot_product` there are none: it computes the teacher's weights already.
    """
    if has_dot_product(synthesizer):
        return []
    return [part for part in parts_of(synthesizer) if isinstance(part, TABLES)]


def parts_of(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts of a mixture, or the one synthesizer itself."""
    if isinstance(synthesizer, MixtureSynthesizer):
        return [part for _, part in synthesizer.components()]
    return [synthesizer]


def write_mean_weights(learner: Learner, means: MeanWeights, other_logits: torch.Tensor | None = None) -> None:
    """Write the logits of the mean weights, minus the mean logits of another part, into the first table.

    `random` takes them unchanged; heads that share a table take the mean over the heads. `factorized_random` takes the best
    approximation of its rank by least squares. Row means are left out: softmax ignores a constant per row.
    """
    synthesizer = learner.synthesizer
    table = table_parts(synthesizer)[0]
    logits = means.log_without_bias(learner.heads, shared=table.config.share_heads)
    if other_logits is not None:
        logits = logits - (other_logits.mean(0, keepdim=True) if table.config.share_heads else other_logits)
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
    """Two factors (H, N, k) whose product is nearest to the logits (H, N, N) minus their row means."""
    centred = logits - logits.mean(-1, keepdim=True)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    root = values[:, None, :rank].sqrt()
    return left[..., :rank] * root, right[:, :rank].transpose(-1, -2) * root


def has_dot_product(synthesizer: Synthesizer) -> bool:
    """Whether the stock layer's logits are a part."""
    return any(isinstance(part, DotProductSynthesizer) for part in parts_of(synthesizer))


def restore_dot_product(synthesizer: Synthesizer) -> None:
    """Make a mixture with `dot_product` equal to stock attention.

    The logits of the other parts become 0. The query projection is divided by the weight α of `dot_product` in the mixture.
    """
    if not isinstance(synthesizer, MixtureSynthesizer) or not has_dot_product(synthesizer):
        return
    synthesizer.start_at_zero()
    alpha = synthesizer.alpha().get("dot_product")
    if alpha is None:
        return
    part = cast(DotProductSynthesizer, synthesizer.parts["dot_product"])
    query = copy.deepcopy(part.query)  # the stock layer, kept for unpatch_model, holds the original
    scale = alpha.detach().repeat_interleave(part.head_dim)
    with torch.no_grad():
        for parameter in query.parameters():  # weight (H·d_h, d), bias (H·d_h)
            parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)).to(parameter))
    part.query = query
