"""The closed form of `dense`, `factorized_dense` and `salience`: what is left of a dot product when one of its sides is the mean.

A stock logit is `s · q_i · k_j` with `q_i = Wq x_i + bq` and `k_j = Wk x_j + bk`. Around the mean query q̄ and the mean key
k̄_j of each position it is

    s · (q_i · k̄_j  +  q̄ · k_j  −  q̄ · k̄_j  +  (q_i − q̄) · (k_j − k̄_j))

The first term looks at the query's token and the key's position, as `dense` does; the second at the key's token, as
`salience` does; the last compares two tokens, which no synthesizer does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..layers.layer_classes import is_understood
from ..layers.projections import projection_of
from ..layers.stock_code import code_of
from ..synthesizers import DenseSynthesizer, FactorizedDenseSynthesizer, SalienceSynthesizer, Synthesizer
from .average import keeps_dot_product, parts_of
from .observe import Call, LayerPair, Learner

SCALES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""What the terms may be multiplied by: the more the left-out term weighs, the less sharp the best guess without it."""
CONSTANTS = (1.0, 1.5, 2.0)
"""What the constant in both factors of `factorized_dense` may be. A larger one leaves less of the product of their other parts,
less of a narrow dtype's digits, and makes each step of a training as much larger."""
SPREAD = 3.0
"""By how many standard deviations the hidden units of a dense part are lifted, so that relu leaves them as they are."""


class MeanStates:
    """The mean hidden state of each position, and mean and variance of the queries, over the tokens of all sequences."""

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
        """Count in one batch, padded on the right."""
        length = min(call.rows.shape[-1], len(self.sum))
        rows = call.rows[:, :length]
        states = call.hidden_states[:, :length].float()
        self.sum[:length] += (states * rows.unsqueeze(-1)).sum(0).double().cpu()
        self.count[:length] += rows.sum(0).unsqueeze(-1).cpu()
        query = self.projections[0](states[rows]).double()  # (tokens, H·d_h)
        self.queries += torch.stack([query.sum(0), query.square().sum(0)]).cpu()

    def positions(self) -> torch.Tensor:
        """x̄_j, (N, d); a position that no sequence reached has the mean of all."""
        mean = self.sum.sum(0) / self.count.sum().clamp(min=1)
        return torch.where(self.count > 0, self.sum / self.count.clamp(min=1), mean)

    def query_mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q̄ and the standard deviation of each unit of the queries, (H·d_h) each."""
        tokens = self.count.sum().clamp(min=1)
        mean, square = self.queries / tokens
        return mean, (square - mean.square()).clamp(min=0).sqrt()

    def salience(self, heads: Sequence[int]) -> torch.Tensor:
        """`u[h] = s · Wk[h]ᵀ q̄[h]` of some heads, (h, d)."""
        mean, _ = self.query_mean_and_deviation()
        weight = self.of_heads(self.projections[1].weight.double().cpu(), heads)
        return self.pair.student.logit_scaling * torch.einsum("hc,hcd->hd", self.of_heads(mean, heads), weight)

    def keys(self, heads: Sequence[int]) -> torch.Tensor:
        """`s · k̄_j` of some heads, (h, N, d_h)."""
        key = self.projections[1]
        keys = nn.functional.linear(
            self.positions(), key.weight.double().cpu(), None if key.bias is None else key.bias.double().cpu()
        )
        return self.pair.student.logit_scaling * self.of_heads(keys.T, heads).transpose(-1, -2)

    def of_heads(self, rows: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """(H·d_h, …) → (h, d_h, …) for some heads."""
        return rows.unflatten(0, (self.pair.student.dimensions[1], -1))[list(heads)]


def salience_of(synthesizer: Synthesizer) -> SalienceSynthesizer | None:
    """The part that takes the keys' term; None beside `dot_product`, which compares the tokens themselves."""
    if keeps_dot_product(synthesizer):
        return None
    return next((part for part in parts_of(synthesizer) if isinstance(part, SalienceSynthesizer)), None)


def dense_of(synthesizer: Synthesizer) -> DenseSynthesizer | FactorizedDenseSynthesizer | None:
    """The part that takes the queries' term: a dense one that is alone or beside salience, with own columns a head."""
    rest = [part for part in parts_of(synthesizer) if not isinstance(part, SalienceSynthesizer)]
    part = rest[0] if len(rest) == 1 else None
    if not isinstance(part, (DenseSynthesizer, FactorizedDenseSynthesizer)) or part.config.share_heads:
        return None
    return part


def first_order_parts(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts that take a first-order term, where queries and keys are compared as they are."""
    return [part for part in (dense_of(synthesizer), salience_of(synthesizer)) if part is not None]


CHANGED = re.compile(r"rotary|rope|norm$|softcap|clip_qkv|^position_embeddings$")
"""What a stock forward calls that by which its logits are more than products of its two projections: rotations, norms of
queries and keys, soft caps, and positions that are added before the projections."""


def compares_plainly(stock: nn.Module) -> bool:
    """Whether the logits of a stock attention module are `s · q_i · k_j`, with a bias at most.

    Its code is asked, as it is for a layer class: a forward that no layer class understands may do anything.
    """
    if not is_understood(stock):
        return False
    names = (name for code in code_of(type(stock)) for name in (*code.co_names, *code.co_varnames))
    return not any(CHANGED.search(name) for name in names)


@dataclass(frozen=True)
class Scale:
    """What a head's first-order terms are multiplied by, and the constant c in both factors of `factorized_dense`."""

    terms: float
    constant: float = 1.0


def scales_for(synthesizer: Synthesizer) -> list[Scale]:
    """What is tried."""
    constants = CONSTANTS if isinstance(dense_of(synthesizer), FactorizedDenseSynthesizer) else (1.0,)
    return [Scale(terms, constant) for terms in SCALES for constant in constants]


@torch.no_grad()
def write_first_order(learner: Learner, means: MeanStates, scales: Sequence[Scale]) -> torch.Tensor | None:
    """Give the dense part and `salience` their terms times each head's scale; what salience says of each position on the
    mean, (h, 1, N), or None.

    The hidden units of a dense part are the queries, with a bias so large that relu cuts almost nothing off: `W1 = Wq`,
    `W2[h, :, j] = s · k̄_j`, and `b2` subtracts what the bias added.
    """
    heads = learner.heads
    terms = torch.tensor([scale.terms for scale in scales], dtype=torch.float64).unsqueeze(-1)  # (h, 1)
    constants = torch.tensor([scale.constant for scale in scales], dtype=torch.float64)
    salience, dense = salience_of(learner.synthesizer), dense_of(learner.synthesizer)
    if salience is not None:
        salience.worth.weight.copy_(terms * means.salience(heads))
    if dense is not None:
        query = means.projections[0]
        mean, deviation = means.query_mean_and_deviation()
        bias = torch.zeros_like(mean) if query.bias is None else query.bias.double().cpu()
        lift = SPREAD * deviation - mean
        dense.hidden.weight.copy_(means.of_heads(query.weight, heads).flatten(0, 1))
        dense.hidden.bias.copy_(means.of_heads(bias + lift, heads).flatten())
        keys = terms.unsqueeze(-1) * means.keys(heads)
        taken_out = means.of_heads(lift + mean if salience is not None else lift, heads)  # (h, d_h)
        if isinstance(dense, DenseSynthesizer):
            dense.columns.copy_(keys)
            dense.bias.copy_(-torch.einsum("hnc,hc->hn", keys, taken_out))
        else:
            write_factors(dense, keys, taken_out, means.count.squeeze(-1), constants)
    if salience is None:
        return None
    return (terms * (means.salience(heads) @ means.positions().T)).unsqueeze(1)


def write_factors(
    dense: FactorizedDenseSynthesizer,
    keys: torch.Tensor,
    taken_out: torch.Tensor,
    count: torch.Tensor,
    constants: torch.Tensor,
) -> None:
    """Give both factors of `factorized_dense` what is nearest to `(hid_i − t) · key_j`.

    With a constant c in each factor the product holds a sum: `(c + u_m/c) (c + v_n/c) = c² + u_m + v_n + u_m·v_n / c²`, of
    which softmax does not see the first, and the last is small where c is large. So the keys are taken apart into a fine part,
    of j mod a, and a coarse part, of j div a, by least squares: `key_j ≈ F[j mod a] + G[j div a]`, `u = (hid − t) · F`.

    Args:
        dense: the part.
        keys: (h, N, d_h).
        taken_out: t, (h, d_h).
        count: (N), how often a position was seen; those that never were have no say.
        constants: c of each head, (h).
    """
    fine, coarse = fine_and_coarse(keys, count, dense.factors)
    constant = constants[:, None, None]
    for part, factor, bias in (
        (fine, dense.inner_weight, dense.inner_bias),
        (coarse, dense.outer_weight, dense.outer_bias),
    ):
        factor.copy_(part.transpose(-1, -2) / constant)
        bias.copy_(constant - torch.einsum("hnc,hc->hn", part, taken_out).unsqueeze(1) / constant)


def fine_and_coarse(
    keys: torch.Tensor, count: torch.Tensor, factors: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """F (h, a, d_h) and G (h, b, d_h) with `key_j ≈ F[j mod a] + G[j div a]`, by least squares over the positions that were seen."""
    a, b = factors
    place = torch.arange(keys.shape[1])
    which = torch.zeros(keys.shape[1], a + b, dtype=keys.dtype)  # (N, a + b)
    which[place, place % a] = 1
    which[place, a + place // a] = 1
    weight = (count / count.sum().clamp(min=1)).sqrt().unsqueeze(-1)
    centred = keys - (keys * weight.square()).sum(1, keepdim=True)  # softmax does not see what all keys have alike
    parts = torch.linalg.pinv(which * weight) @ (centred * weight)  # (h, a + b, d_h)
    return parts[:, :a], parts[:, a:]
