"""The base class of variants that choose keys: one projection makes queries and keys."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import nn

from ..device.matmul import linear
from ..errors import UnsupportedModelError
from ..logits.choice import Choice
from ..logits.forms import Logits, Sparse
from ..logits.positions import Positions
from .base import Synthesizer
from .stock_weights import is_quantized


class SharedProjectionSynthesizer(Synthesizer):
    """`S[h, i, j] = x̃_i[h] · x̃_j[h] · scaling` with x̃ = W x, for the keys j that query i chooses.

    W starts as the mean of the base model's query and key projections, and keeps its scaling.
    """

    formula: ClassVar[str] = "x̃_i[h] · x̃_j[h] · scaling, x̃ = W x"
    parameter_formula = "d²"
    chooses_keys = True
    stock_projections = ("projection", "projection")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.projection: nn.Module = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.scaling = self.head_dim**-0.5
        self.causal = False

    def choice(self) -> Choice:
        """Return the rule that chooses the keys of each query."""
        raise TypeError(f"{type(self).__name__} must define choice()")

    @property
    def key_width(self) -> int:
        return self.head_dim

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        """Start as the mean of the two projections. If only one has a bias (Whisper), the missing one counts as 0.

        Raises:
            UnsupportedModelError: for quantized projections, which cannot be averaged.
        """
        if is_quantized(query) or is_quantized(key):
            raise UnsupportedModelError(
                f"The variant {self.variant!r} starts as the mean of the stock query and key projections, but these are "
                f"quantized, and cannot be averaged. Patch the model before it is quantized, or take a variant that does not "
                f"use them, or dot_product, which keeps them unchanged."
            )
        stock_parameters = [dict(projection.named_parameters()) for projection in (query, key)]
        self.projection, self.scaling = (
            copy.deepcopy(query if len(stock_parameters[0]) >= len(stock_parameters[1]) else key),
            scaling,
        )
        with torch.no_grad():
            for name, shared in self.projection.named_parameters():
                stock: list[torch.Tensor] = [parameters[name] for parameters in stock_parameters if name in parameters]
                shared.copy_(torch.stack(stock).sum(0)).div_(2)

    def set_causal(self, causal: bool) -> None:
        super().set_causal(causal)
        self.causal = causal

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.split_heads(linear(self.projection, hidden_states))

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        assert key_states is not None  # `project_keys` made them
        length = positions.query_length
        if positions.key_length == length:
            query = key_states
        elif isinstance(positions.start, int):
            query = key_states.narrow(-2, positions.start, length)
        else:
            query = key_states.index_select(
                -2, positions.start + torch.arange(length, device=key_states.device)
            )  # a static cache is longer than its content
        window_positions = positions if positions.windowed else None
        return Sparse(query, key_states, self.scaling, self.choice(), positions.start, self.causal, window_positions)
