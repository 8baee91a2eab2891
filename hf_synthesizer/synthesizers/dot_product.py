"""Dot-product attention, as in the stock layer: a part for mixtures and for groups of heads."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..device.matmul import linear
from ..logits.forms import Logits, LowRank
from ..logits.positions import Positions
from .base import Synthesizer
from .registry import register_variant


@register_variant("dot_product")
class DotProductSynthesizer(Synthesizer):
    """`S[h, i, j] = (Wq x_i)[h] · (Wk x_j)[h] · scaling`, with the base model's own projections and scaling.

    `dot_product` is the stock attention. Use it as a part of a mixture: with `mixing="sum"` a model then starts as
    exactly the stock model.
    """

    formula = "(Wq x_i)[h] · (Wk x_j)[h] · scaling"
    has_any_length = True
    parameter_formula = "2·d²"
    is_stock = True
    stock_projections = ("query", "key")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.query: nn.Module = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.key: nn.Module = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)
        self.scaling = self.head_dim**-0.5

    @property
    def key_width(self) -> int:
        return self.head_dim

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        self.query, self.key, self.scaling = query, key, scaling

    def start_at_zero(self) -> None:
        """Do nothing: the other parts are added to the stock logits."""

    def divide_by(self, alpha: torch.Tensor) -> None:
        """Divide the logits of each head by its weight (H) in a mixture."""
        query = copy.deepcopy(self.query)  # the stock layer, kept for unpatch_model, holds the original
        scale = alpha.detach().repeat_interleave(self.head_dim)
        with torch.no_grad():
            for parameter in query.parameters():  # weight (H·d_h, d), bias (H·d_h)
                parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)).to(parameter))
        self.query = query

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.split_heads(linear(self.key, hidden_states))

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        assert key_states is not None  # `project_keys` made them
        return LowRank(self.split_heads(linear(self.query, hidden_states)) * self.scaling, key_states)
