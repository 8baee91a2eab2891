"""The dot products of a stock forward, as one part of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...errors import UnsupportedModelError
from ...logits.forms import Explicit, Grouped, Logits, LowRank, Sum, weighted
from ...logits.positions import Positions
from ...logits.reach import Windowed
from ...synthesizers import Synthesizer


class StockDotProduct(Synthesizer):
    """`S[h, i, j] = q_i[h] · k_j[h] · scaling`, with the queries and keys of the stock forward, for these `heads` of the layer.

    It returns a placeholder (`StockLogits`); `filled` puts the dot products in its place.
    """

    variant = "dot_product"
    formula = "the stock layer's own"
    parameter_formula = "2·d²"
    is_stock = True
    heads: tuple[int, ...] = ()

    def start_at_zero(self) -> None:
        """Nothing: the other parts are added to this one."""

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        return StockLogits(self.heads, positions.query_length)


class StockLogits(Logits):
    """A placeholder for the dot products of these heads until the stock forward has computed queries and keys."""

    def __init__(self, heads: Sequence[int], query_length: int):
        self.heads = heads
        self.query_length = query_length

    def materialize(self) -> torch.Tensor:
        raise UnsupportedModelError("The stock layer hands its dot products over in its own forward pass only.")


def filled(logits: Logits, dot_products: Callable[[Sequence[int]], Logits]) -> Logits:
    """The logits with `dot_products(heads)` in place of each placeholder."""
    if isinstance(logits, StockLogits):
        return dot_products(logits.heads)
    if isinstance(logits, Windowed):
        return Windowed(filled(logits.logits, dot_products), logits.window, logits.sinks, logits.positions)
    if isinstance(logits, Sum):
        return Sum([weighted(weight, filled(term, dot_products)) for weight, term in logits.terms])
    if isinstance(logits, Grouped):
        return Grouped(logits.heads, [filled(group, dot_products) for group in logits.logits])
    return logits


def of_heads(tensor: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """These heads of (B, H, L, d)."""
    return tensor if list(wanted) == list(range(tensor.shape[1])) else tensor[:, list(wanted)]


def dot_product(query: torch.Tensor, key: torch.Tensor, scaling: float | None, softcap: float | None) -> Logits:
    """`query · keyᵀ · scaling`, capped if there is a `softcap`."""
    scaled = LowRank(query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key)
    return scaled if softcap is None else Explicit(softcap * torch.tanh(scaled.materialize() / softcap))
