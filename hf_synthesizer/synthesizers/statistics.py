"""What a closed form knows of the teacher: means over the calls of one attention layer of a stock model.

A transfer runs the teacher, gives each call to the statistic that a variant names (`Synthesizer.statistic`), and lets
the variant compute its parameters from it (`Synthesizer.fit`). A variant may define a statistic of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

LIFT = 3.0
"""The bias of hidden units that hold queries, in standard deviations: so large that relu cuts off almost nothing."""


@dataclass(frozen=True)
class TeacherCall:
    """One call of the teacher's layer.

    `hidden_states` (B, L, d) is the input, and `weights` (B, H, L, L) are the attention weights. `rows` (B, L) tells
    which queries are tokens, and `pairs` (B, L, L) which keys a token may attend to. `position_bias` (1 or B, H, L, L)
    is the bias that T5 and MPNet add to their logits. `rotation` is cosine and sine, (L, r) each, by which queries and
    keys at the positions from 0 on are rotated; None in a model without rotations.
    """

    hidden_states: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    pairs: torch.Tensor
    position_bias: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class TeacherLayer:
    """The teacher's layer: d = `hidden_size`, H = `num_heads`, d_h = `head_dim`, N = `max_length` of the synthesizer.

    `projections` are its query and key projections, and `scaling` is the factor of their product. `projections` is None
    for statistics that do not need dot products. `options` are those of the variant.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    max_length: int
    projections: tuple[nn.Linear, nn.Linear] | None = None
    scaling: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


class Statistic:
    """A mean over the calls of one layer of the teacher."""

    needs_dot_products: ClassVar[bool] = False
    """Whether it needs the teacher's projections. Then `fit` writes first-order terms, scaled for each head."""
    knows_rotations: ClassVar[bool] = False
    """Whether it serves dot products of rotated queries and keys too (Llama)."""

    def __init__(self, layer: TeacherLayer):
        self.layer = layer

    def add(self, call: TeacherCall) -> None:
        """Add one call."""
        raise TypeError(f"{type(self).__name__} must define add()")


@dataclass(frozen=True)
class Fit:
    """What a closed form is computed from, for the h heads of a synthesizer.

    Attributes:
        statistic: an instance of the class that the variant names.
        heads: the heads of the teacher's layer that the synthesizer replaces.
        scales: the scale of each head's first-order terms, (h, 1).
        constants: one of `Synthesizer.constants` for each head, (h).
        alpha: the weight of the part in its mixture, (h); None if it is 1.
        other_logits: the mean logits (h, 1, N) of parts that are fitted already; None if there are none.
        beside_keys: whether another part has the term of the keys' tokens.
    """

    statistic: Any
    heads: Sequence[int]
    scales: torch.Tensor
    constants: torch.Tensor
    alpha: torch.Tensor | None = None
    other_logits: torch.Tensor | None = None
    beside_keys: bool = False


class MeanWeights(Statistic):
    """The constant attention nearest to a layer's, over the valid pairs (i, j) of all sequences seen.

    A pair is valid if i is a token and may attend to j. Padding is on the right, so all sequences start at key 0. Under
    a mask, constant logits give a shorter sequence the weights of a longer one, divided by their sum over its own keys.
    A mean of weights would depend on the lengths of the sequences: each weight is smaller in a longer sequence. This
    share does not:

        q[h, i, j] = Σ_b weights[b, h, i, j] / Σ_b Σ_{k ≤ j} weights[b, h, i, k]

    Both sums run over the sequences b that have key j.
    """

    def __init__(self, layer: TeacherLayer):
        super().__init__(layer)
        num_heads, max_length = layer.num_heads, layer.max_length
        self.sum = torch.zeros(num_heads, max_length, max_length, dtype=torch.float64)
        self.before = torch.zeros_like(self.sum)  # Σ_b Σ_{k < j} weights, over the sequences that have j
        self.count = torch.zeros(max_length, max_length, dtype=torch.float64)
        self.bias: torch.Tensor | None = None

    def add(self, call: TeacherCall) -> None:
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

        In a masked softmax of R, key j has the share q_j of the keys up to j, at any length. The likelihood of the
        weights is a product over these shares. If all sequences have the same keys, R is the logarithm of the mean
        weights (Hassid et al. 2022, arXiv 2211.03495).

        A pair that occurs in no sequence takes the mean of its diagonal j − i, or of the nearest diagonal that occurs.
        So a longer sequence continues the pattern of the shorter ones.
        """
        tiny = torch.finfo(torch.float32).tiny
        occurs = self.count > 0
        total = (self.sum + self.before).clamp(min=tiny)
        rest = (self.before / total).clamp(min=tiny).log().masked_fill(~occurs, 0.0)  # log(1 − q)
        later = nn.functional.pad(rest.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))  # Σ_{k > j}
        logits = ((self.sum / total).clamp(min=tiny).log() + later).clamp(min=math.log(tiny))
        return torch.where(occurs, logits, _diagonal_means(self.sum, self.count).clamp(min=tiny).log())

    def logits_for(self, fit: Fit, shared: bool = False) -> torch.Tensor:
        """The logits (h, N, N) with which a part makes the mean weights: without position bias, other parts and α.

        With `shared`, the result has the mean over the heads, (1, N, N).
        """
        logits = self.log()
        subtracted = torch.zeros_like(logits)
        if self.bias is not None:  # some models add a position bias to the logits (T5)
            length = self.bias.shape[-1]
            has_bias = torch.zeros_like(self.count)
            has_bias[:length, :length] = 1
            subtracted[:, :length, :length] = self.bias
            subtracted = torch.where(has_bias > 0, subtracted, _diagonal_means(subtracted, has_bias))
        logits, subtracted = logits[list(fit.heads)], subtracted[list(fit.heads)]
        if fit.other_logits is not None:
            subtracted = subtracted + fit.other_logits
        if shared:
            logits, subtracted = logits.exp().mean(0, keepdim=True).log(), subtracted.mean(0, keepdim=True)
        logits = logits - subtracted
        if fit.alpha is not None and len(logits) == len(fit.alpha):
            logits = logits / fit.alpha.double().cpu()[:, None, None]
        return logits


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


class MeanStates(Statistic):
    """The mean hidden state at each position, and mean and variance of the queries, over the tokens of all sequences.

    A stock logit is `s · q_i · k_j` with `q_i = Wq x_i + bq` and `k_j = Wk x_j + bk`. Around the mean query q̄ and the
    mean key k̄_j of each position it is

        s · (q_i · k̄_j  +  q̄ · k_j  −  q̄ · k̄_j  +  (q_i − q̄) · (k_j − k̄_j))

    The first term depends on the query's token and the key's position, as `dense` does. The second depends on the key's
    token, as `salience` does. The last depends on two tokens, and no synthesizer can express it.
    """

    needs_dot_products = True

    def __init__(self, layer: TeacherLayer):
        super().__init__(layer)
        assert layer.projections is not None  # of a first-order part
        self.query, self.key = layer.projections
        self.sum = torch.zeros(layer.max_length, layer.hidden_size, dtype=torch.float64)
        self.count = torch.zeros(len(self.sum), 1, dtype=torch.float64)
        self.query_sums = torch.zeros(2, layer.num_heads * layer.head_dim, dtype=torch.float64)  # Σ q, Σ q²

    @torch.no_grad()
    def add(self, call: TeacherCall) -> None:
        """Add one batch, padded on the right."""
        if not self.layer.max_length and call.rows.shape[-1] > len(self.sum):  # no longest sequence
            more = call.rows.shape[-1] - len(self.sum)
            self.sum, self.count = (nn.functional.pad(tensor, (0, 0, 0, more)) for tensor in (self.sum, self.count))
        length = min(call.rows.shape[-1], len(self.sum))
        rows = call.rows[:, :length]
        states = call.hidden_states[:, :length].float()
        self.sum[:length] += (states * rows.unsqueeze(-1)).sum(0).double().cpu()
        self.count[:length] += rows.sum(0).unsqueeze(-1).cpu()
        query = self.query(states[rows]).double()  # (tokens, H·d_h)
        self.query_sums += torch.stack([query.sum(0), query.square().sum(0)]).cpu()

    def positions(self) -> torch.Tensor:
        """x̄_j, (N, d). A position that occurs in no sequence takes the mean over all positions."""
        mean = self.sum.sum(0) / self.count.sum().clamp(min=1)
        return torch.where(self.count > 0, self.sum / self.count.clamp(min=1), mean)

    def query_mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q̄ and the standard deviation of each unit of the queries, (H·d_h) each."""
        tokens = self.count.sum().clamp(min=1)
        mean, square = self.query_sums / tokens
        return mean, (square - mean.square()).clamp(min=0).sqrt()

    def salience(self, heads: Sequence[int]) -> torch.Tensor:
        """`u[h] = s · Wk[h]ᵀ q̄[h]` for these heads, (h, d)."""
        mean, _ = self.query_mean_and_deviation()
        weight = self.of_heads(self.key.weight.double().cpu(), heads)
        return self.layer.scaling * torch.einsum("hc,hcd->hd", self.of_heads(mean, heads), weight)

    def keys(self, heads: Sequence[int]) -> torch.Tensor:
        """`s · k̄_j` for these heads, (h, N, d_h)."""
        bias = None if self.key.bias is None else self.key.bias.double().cpu()
        keys = nn.functional.linear(self.positions(), self.key.weight.double().cpu(), bias)
        return self.layer.scaling * self.of_heads(keys.T, heads).transpose(-1, -2)

    def of_heads(self, rows: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Select heads: (H·d_h, …) → (h, d_h, …)."""
        return rows.unflatten(0, (self.layer.num_heads, -1))[list(heads)]

    def write_queries(self, hidden: nn.Linear, fit: Fit) -> torch.Tensor:
        """Make the units of `relu(hidden(x))` the queries plus a bias so large that relu cuts off almost nothing.

        Returns:
            What to subtract from the units again, (h, d_h): that bias, and the mean query if another part has its term.
        """
        mean, deviation = self.query_mean_and_deviation()
        bias = torch.zeros_like(mean) if self.query.bias is None else self.query.bias.double().cpu()
        lift = LIFT * deviation - mean
        hidden.weight.copy_(self.of_heads(self.query.weight, fit.heads).flatten(0, 1))
        hidden.bias.copy_(self.of_heads(bias + lift, fit.heads).flatten())
        return self.of_heads(lift + mean if fit.beside_keys else lift, fit.heads)
