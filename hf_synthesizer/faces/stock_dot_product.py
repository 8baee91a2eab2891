"""The dot products of a stock forward, as one part among others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedModelError
from ..logits import Explicit, Logits, LowRank
from ..positions import Positions
from ..synthesizers import Synthesizer


class StockDotProduct(Synthesizer):
    """`S[h, i, j] = q_i[h] · k_j[h] · scaling`, with the queries and keys that the stock forward hands over.

    `heads` are the layer's heads that these are.
    """

    formula = "the stock layer's own"
    parameter_formula = "2·d²"
    is_stock = True
    given: Logits | None = None
    heads: tuple[int, ...] = ()

    def start_at_zero(self) -> None:
        """Stays as it is: it is the part that the others are added to."""

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        if self.given is None:
            raise UnsupportedModelError("The stock layer hands its dot products over in its own forward pass only.")
        return self.given


def of_heads(tensor: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """These heads of (B, H, L, d)."""
    return tensor if list(wanted) == list(range(tensor.shape[1])) else tensor[:, list(wanted)]


def dot_product(query: torch.Tensor, key: torch.Tensor, scaling: float | None, softcap: float | None) -> Logits:
    """`query · keyᵀ · scaling`, capped if need be."""
    scaled = LowRank(query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key)
    return scaled if softcap is None else Explicit(softcap * torch.tanh(scaled.materialize() / softcap))
