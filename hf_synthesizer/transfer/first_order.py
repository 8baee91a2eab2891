"""The closed form of `dense`, `factorized_dense` and `salience`: a dot product in which one side is replaced by its mean.

A stock logit is `s · q_i · k_j` with `q_i = Wq x_i + bq` and `k_j = Wk x_j + bk`. Around the mean query q̄ and the mean key
k̄_j of each position it is

    s · (q_i · k̄_j  +  q̄ · k_j  −  q̄ · k̄_j  +  (q_i − q̄) · (k_j − k̄_j))

The first term depends on the query's token and the key's position, as `dense` does. The second depends on the key's token, as
`salience` does. The last depends on two tokens, and no synthesizer can express it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..layers.finding.layer_classes import is_understood
from ..layers.finding.projections import projection_of
from ..layers.finding.stock_code import code_of
from ..synthesizers import DenseSynthesizer, FactorizedDenseSynthesizer, SalienceSynthesizer, Synthesizer
from .average import has_dot_product, parts_of
from .observe import Call, LayerPair, Learner

SCALES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""The candidates for the scale of the terms. The larger the missing last term, the smaller the best scale."""
CONSTANTS = (1.0, 1.5, 2.0)
"""The candidates for the constant c in both factors of `factorized_dense`. A larger c leaves less of the unwanted product, but
loses precision in narrow dtypes, and makes each training step c times as large."""
LIFT = 3.0
"""The bias of a dense part's hidden units, in standard deviations: so large that relu cuts off almost nothing."""


class MeanStates:
    """The mean hidden state at each position, and mean and variance of the queries, over the tokens of all sequences."""

    def __init__(self, pair: LayerPair):
        hidden_size, num_heads, head_dim = pair.student.dimensions
        self.pair = pair
        self.sum = torch.zeros(pair.student.synthesizer.max_length, hidden_size, dtype=torch.float64)
        self.count = torch.zeros(len(self.sum), 1, dtype=torch.float64)
        self.queries = torch.zeros(2, num_heads * head_dim, dtype=torch.float64)  # Σ q, Σ q²

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear]:
        """The stock layer's query and key projections."""
        projection_names = self.pair.student.projection_names
        query, key = (projection_of(self.pair.teacher, projection_names, name) for name in ("query", "key"))
        return cast(nn.Linear, query), cast(nn.Linear, key)

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Add one batch, padded on the right."""
        length = min(call.rows.shape[-1], len(self.sum))
        rows = call.rows[:, :length]
        states = call.hidden_states[:, :length].float()
        self.sum[:length] += (states * rows.unsqueeze(-1)).sum(0).double().cpu()
        self.count[:length] += rows.sum(0).unsqueeze(-1).cpu()
        query = self.projections[0](states[rows]).double()  # (tokens, H·d_h)
        self.queries += torch.stack([query.sum(0), query.square().sum(0)]).cpu()

    def positions(self) -> torch.Tensor:
        """x̄_j, (N, d). A position that occurs in no sequence takes the mean over all positions."""
        mean = self.sum.sum(0) / self.count.sum().clamp(min=1)
        return torch.where(self.count > 0, self.sum / self.count.clamp(min=1), mean)

    def query_mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q̄ and the standard deviation of each unit of the queries, (H·d_h) each."""
        tokens = self.count.sum().clamp(min=1)
        mean, square = self.queries / tokens
        return mean, (square - mean.square()).clamp(min=0).sqrt()

    def salience(self, heads: Sequence[int]) -> torch.Tensor:
        """`u[h] = s · Wk[h]ᵀ q̄[h]` for these heads, (h, d)."""
        mean, _ = self.query_mean_and_deviation()
        weight = self.of_heads(self.projections[1].weight.double().cpu(), heads)
        return self.pair.student.logit_scaling * torch.einsum("hc,hcd->hd", self.of_heads(mean, heads), weight)

    def keys(self, heads: Sequence[int]) -> torch.Tensor:
        """`s · k̄_j` for these heads, (h, N, d_h)."""
        key = self.projections[1]
        keys = nn.functional.linear(
            self.positions(), key.weight.double().cpu(), None if key.bias is None else key.bias.double().cpu()
        )
        return self.pair.student.logit_scaling * self.of_heads(keys.T, heads).transpose(-1, -2)

    def of_heads(self, rows: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Select heads: (H·d_h, …) → (h, d_h, …)."""
        return rows.unflatten(0, (self.pair.student.dimensions[1], -1))[list(heads)]


def salience_part(synthesizer: Synthesizer) -> SalienceSynthesizer | None:
    """The part that takes the keys' term. None beside `dot_product`, which has the whole product."""
    if has_dot_product(synthesizer):
        return None
    return next((part for part in parts_of(synthesizer) if isinstance(part, SalienceSynthesizer)), None)


def dense_part(synthesizer: Synthesizer) -> DenseSynthesizer | FactorizedDenseSynthesizer | None:
    """The part that takes the queries' term: a dense one, alone or beside salience, whose heads share no columns."""
    rest = [part for part in parts_of(synthesizer) if not isinstance(part, SalienceSynthesizer)]
    part = rest[0] if len(rest) == 1 else None
    if not isinstance(part, (DenseSynthesizer, FactorizedDenseSynthesizer)) or part.config.share_heads:
        return None
    return part


def first_order_parts(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts that take a first-order term, if the stock logits are plain dot products."""
    return [part for part in (dense_part(synthesizer), salience_part(synthesizer)) if part is not None]


NOT_PLAIN = re.compile(r"rotary|rope|norm$|softcap|clip_qkv|^position_embeddings$")
"""Names in the code of a stock forward whose logits are not plain products of two projections: rotations, norms of queries
and keys, soft caps, and positions that are added before the projections."""


def has_plain_logits(stock: nn.Module) -> bool:
    """Whether the logits of a stock attention module are `s · q_i · k_j`, with or without a position bias.

    The names in its code tell, as for layer classes. False if no layer class understands the forward.
    """
    if not is_understood(stock):
        return False
    names = (name for code in code_of(type(stock)) for name in (*code.co_names, *code.co_varnames))
    return not any(NOT_PLAIN.search(name) for name in names)


@dataclass(frozen=True)
class Scale:
    """The scale of a head's first-order terms, and the constant c in both factors of `factorized_dense`."""

    terms: float
    constant: float = 1.0


def candidate_scales(synthesizer: Synthesizer) -> list[Scale]:
    """The scales among which each head chooses."""
    constants = CONSTANTS if isinstance(dense_part(synthesizer), FactorizedDenseSynthesizer) else (1.0,)
    return [Scale(terms, constant) for terms in SCALES for constant in constants]


@torch.no_grad()
def write_first_order(learner: Learner, means: MeanStates, scales: Sequence[Scale]) -> torch.Tensor | None:
    """Write the terms of the dense part and of `salience`, times each head's scale.

    Returns the mean logits of salience at each position, (h, 1, N), or None without salience.

    The hidden units of a dense part are the queries plus a bias so large that relu cuts off almost nothing: `W1 = Wq`,
    `W2[h, :, j] = s · k̄_j`. `b2` subtracts the effect of that bias.
    """
    heads = learner.heads
    terms = torch.tensor([scale.terms for scale in scales], dtype=torch.float64).unsqueeze(-1)  # (h, 1)
    constants = torch.tensor([scale.constant for scale in scales], dtype=torch.float64)
    salience, dense = salience_part(learner.synthesizer), dense_part(learner.synthesizer)
    if salience is not None:
        salience.worth.weight.copy_(terms * means.salience(heads))
    if dense is not None:
        query = means.projections[0]
        mean, deviation = means.query_mean_and_deviation()
        bias = torch.zeros_like(mean) if query.bias is None else query.bias.double().cpu()
        lift = LIFT * deviation - mean
        dense.hidden.weight.copy_(means.of_heads(query.weight, heads).flatten(0, 1))
        dense.hidden.bias.copy_(means.of_heads(bias + lift, heads).flatten())
        keys = terms.unsqueeze(-1) * means.keys(heads)
        offset = means.of_heads(lift + mean if salience is not None else lift, heads)  # (h, d_h)
        if isinstance(dense, DenseSynthesizer):
            dense.columns.copy_(keys)
            dense.bias.copy_(-torch.einsum("hnc,hc->hn", keys, offset))
        else:
            write_factors(dense, keys, offset, means.count.squeeze(-1), constants)
    if salience is None:
        return None
    return (terms * (means.salience(heads) @ means.positions().T)).unsqueeze(1)


def write_factors(
    dense: FactorizedDenseSynthesizer,
    keys: torch.Tensor,
    offset: torch.Tensor,
    count: torch.Tensor,
    constants: torch.Tensor,
) -> None:
    """Write the factors of `factorized_dense` so that their product is near to `(hidden_i − t) · key_j`.

    With a constant c in each factor, the product contains a sum: `(c + u_m/c) (c + v_n/c) = c² + u_m + v_n + u_m·v_n / c²`.
    Softmax ignores c², and the last term is small if c is large. Least squares split the keys into a fine part by j mod a and a
    coarse part by j div a: `key_j ≈ F[j mod a] + G[j div a]`. Then `u = (hidden − t) · F` and `v = (hidden − t) · G`.

    Args:
        dense: the part to write.
        keys: (h, N, d_h).
        offset: t, (h, d_h).
        count: how often each position occurs, (N). It weights the least squares.
        constants: c of each head, (h).
    """
    fine, coarse = fine_and_coarse(keys, count, dense.factors)
    constant = constants[:, None, None]
    for part, factor, bias in (
        (fine, dense.inner_weight, dense.inner_bias),
        (coarse, dense.outer_weight, dense.outer_bias),
    ):
        factor.copy_(part.transpose(-1, -2) / constant)
        bias.copy_(constant - torch.einsum("hnc,hc->hn", part, offset).unsqueeze(1) / constant)


def fine_and_coarse(
    keys: torch.Tensor, count: torch.Tensor, factors: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """F (h, a, d_h) and G (h, b, d_h) with `key_j ≈ F[j mod a] + G[j div a]`: least squares over the positions that occur."""
    a, b = factors
    position = torch.arange(keys.shape[1])
    design = torch.zeros(keys.shape[1], a + b, dtype=keys.dtype)  # (N, a + b)
    design[position, position % a] = 1
    design[position, a + position // a] = 1
    weight = (count / count.sum().clamp(min=1)).sqrt().unsqueeze(-1)
    centred = keys - (keys * weight.square()).sum(1, keepdim=True)  # softmax ignores a constant
    parts = torch.linalg.pinv(design * weight) @ (centred * weight)  # (h, a + b, d_h)
    return parts[:, :a], parts[:, a:]
