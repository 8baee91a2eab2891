"""The closed form of `dense` and `salience`: what is left of a dot product when one of its sides is the mean.

A stock logit is `s · q_i · k_j` with `q_i = Wq x_i + bq` and `k_j = Wk x_j + bk`. Around the mean query q̄ and the mean key
k̄_j of each position it is

    s · (q_i · k̄_j  +  q̄ · k_j  −  q̄ · k̄_j  +  (q_i − q̄) · (k_j − k̄_j))

The first term looks at the query's token and the key's position, as `dense` does; the second at the key's token, as
`salience` does; the last compares two tokens, which no synthesizer does.
"""

from __future__ import annotations

import inspect
import re
from typing import cast

import torch
from torch import nn

from ..faces.attention import find_face
from ..faces.mixin import SynthesizerMixin
from ..faces.wiring import projection_of
from ..synthesizers import DenseSynthesizer, SalienceSynthesizer
from .average import keeps_dot_product, parts_of
from .observe import Call, LayerPair

SCALES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""What the terms may be multiplied by: the more the left-out term weighs, the less sharp the best guess without it."""
SPREAD = 3.0
"""By how many standard deviations the hidden units of `dense` are lifted, so that relu leaves them as they are."""


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
        wiring = self.pair.student.wiring
        query, key = (projection_of(self.pair.teacher, wiring, name) for name in ("query", "key"))
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

    def salience(self) -> torch.Tensor:
        """`u[h] = s · Wk[h]ᵀ q̄[h]`, (H, d)."""
        heads = self.pair.student.synthesizer.num_heads
        mean, _ = self.query_mean_and_deviation()
        weight = self.projections[1].weight.double().cpu()
        return self.pair.student.logit_scaling * torch.einsum(
            "hc,hcd->hd", mean.view(heads, -1), weight.view(heads, -1, weight.shape[-1])
        )

    def keys(self) -> torch.Tensor:
        """`s · k̄_j`, (H, N, d_h)."""
        key = self.projections[1]
        keys = nn.functional.linear(
            self.positions(), key.weight.double().cpu(), None if key.bias is None else key.bias.double().cpu()
        )
        return self.pair.student.logit_scaling * keys.view(
            len(keys), self.pair.student.synthesizer.num_heads, -1
        ).transpose(0, 1)


def salience_of(layer: SynthesizerMixin) -> SalienceSynthesizer | None:
    """The part that takes the keys' term; None beside `dot_product`, which compares the tokens themselves."""
    if keeps_dot_product(layer.synthesizer):
        return None
    return next((part for part in parts_of(layer.synthesizer) if isinstance(part, SalienceSynthesizer)), None)


def dense_of(layer: SynthesizerMixin) -> DenseSynthesizer | None:
    """The part that takes the queries' term: a `dense` that is alone or beside salience, with own columns a head."""
    rest = [part for part in parts_of(layer.synthesizer) if not isinstance(part, SalienceSynthesizer)]
    part = rest[0] if len(rest) == 1 else None
    return part if isinstance(part, DenseSynthesizer) and not part.config.share_heads else None


def first_order_parts(layer: SynthesizerMixin) -> list[DenseSynthesizer | SalienceSynthesizer]:
    """The parts of a layer that take a first-order term, where queries and keys are compared as they are."""
    return [part for part in (dense_of(layer), salience_of(layer)) if part is not None]


CHANGED = re.compile(r"rotary|rope|norm$|softcap|clip_qkv|^position_embeddings$")
"""What a stock forward calls that by which its logits are more than products of its two projections: rotations, norms of
queries and keys, soft caps, and positions that are added before the projections."""


def compares_plainly(stock: nn.Module) -> bool:
    """Whether the logits of a stock attention module are `s · q_i · k_j`, with a bias at most.

    Its code is asked, as it is for a face: a forward that no face understands may do anything.
    """
    if find_face(type(stock)) is None:
        return False
    code = inspect.unwrap(type(stock).forward).__code__
    return not any(CHANGED.search(name) for name in (*code.co_names, *code.co_varnames))


@torch.no_grad()
def write_first_order(means: MeanStates, scale: float) -> torch.Tensor | None:
    """Give `dense` and `salience` their terms times a scale; what salience says of each position on the mean, (H, 1, N),
    or None.

    The hidden units of `dense` are the queries, lifted above relu's corner: `W1 = Wq`, `W2[h, :, j] = s · k̄_j`, and `b2`
    takes the lift out again.
    """
    salience, dense = salience_of(means.pair.student), dense_of(means.pair.student)
    if salience is not None:
        salience.worth.weight.copy_(scale * means.salience())
    if dense is not None:
        query = means.projections[0]
        mean, deviation = means.query_mean_and_deviation()
        bias = torch.zeros_like(mean) if query.bias is None else query.bias.double().cpu()
        lift = SPREAD * deviation - mean
        dense.hidden.weight.copy_(query.weight)
        dense.hidden.bias.copy_(bias + lift)
        keys = scale * means.keys()
        taken_out = lift + mean if salience is not None else lift
        dense.columns.copy_(keys)
        dense.bias.copy_(-torch.einsum("hnc,hc->hn", keys, taken_out.view(len(keys), -1)))
    if salience is None:
        return None
    return scale * (means.salience() @ means.positions().T).unsqueeze(1)
