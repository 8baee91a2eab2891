"""Mixtures `a+b[+c]`: a weighted sum of other synthesizers' logits (section 3.5 of the paper)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from ..logits.forms import Logits, Sum, weighted
from ..logits.positions import Positions
from .base import Synthesizer
from .dot_product import DotProductSynthesizer
from .registry import get_variant


class MixtureSynthesizer(Synthesizer):
    """`S[h, i, j] = Σ_c α[h, c] · S_c[h, i, j]`, one scalar weight a head and component.

    With `mixing="softmax"`, α is a softmax over the components. A key-side part such as `salience` has weight 1 and
    takes no part in the softmax. If only one component is left, its weight is 1 too. With `mixing="sum"`, each
    component has a free weight that starts at 1, and the logits of new parts start at 0.

    With "sum", `mixing_change = α − 1` is the trained parameter. So weight decay pulls α to 1, and not the pretrained
    part to 0.
    """

    formula = "Σ_c α[h, c] · S_c[h, i, j]"
    parameter_formula = "Σ + H·C"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.config
        sizes = (self.hidden_size, self.num_heads, self.max_length)
        self.parts = nn.ModuleDict(
            {name: get_variant(name)(*sizes, config, head_dim=self.head_dim) for name in config.parts}
        )
        for _, part in self.components():
            part.limits_reach = False
        softmax = config.mixing == "softmax"
        self.weighted = [name for name in config.parts if not (softmax and get_variant(name).key_side)]
        if softmax and len(self.weighted) < 2:
            self.weighted = []
        shape = (self.num_heads, len(self.weighted))  # (H, C)
        if self.weighted and softmax:
            self.mixing_weights: torch.Tensor = nn.Parameter(torch.zeros(shape))
        elif self.weighted:
            self.register_buffer("mixing_weights", torch.ones(shape))
            self.mixing_change = nn.Parameter(torch.zeros(shape))
        if not softmax and all(part.starts_fresh for _, part in self.components()):
            self.start_at_zero()

    @property
    def key_width(self) -> int:
        return sum(part.key_width for _, part in self.components())

    @property
    def logit_width(self) -> int:
        return sum(part.logit_width for _, part in self.components())

    @property
    def token_products(self) -> int:
        return sum(part.token_products for _, part in self.components())

    def components(self) -> Iterator[tuple[str, Synthesizer]]:
        return ((name, cast(Synthesizer, part)) for name, part in self.parts.items())

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        for _, part in self.components():
            part.load_stock(query, key, scaling)

    def start_as_stock(self) -> None:
        """Make the logits of the other parts 0, and divide those of `dot_product` by its weight α."""
        if not any(part.is_stock for _, part in self.components()):
            return
        alpha = self.alpha()
        for name, part in self.components():
            part.start_at_zero()
            if isinstance(part, DotProductSynthesizer) and name in alpha:
                part.divide_by(alpha[name])

    def set_causal(self, causal: bool) -> None:
        super().set_causal(causal)
        for _, part in self.components():
            part.set_causal(causal)

    def start_at_zero(self) -> None:
        for _, part in self.components():
            part.start_at_zero()

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        projected = [part.project_keys(hidden_states) for _, part in self.components()]
        states = [state for state in projected if state is not None]
        return torch.cat(states, dim=-1) if states else None  # (B, H, L, Σ widths)

    def alpha(self) -> dict[str, torch.Tensor]:
        if not self.weighted:
            return {}
        if self.config.mixing == "softmax":
            weights = self.mixing_weights.softmax(-1)
        else:
            weights = self.mixing_weights + self.mixing_change
        return dict(zip(self.weighted, weights.unbind(-1), strict=True))

    def static_table(self) -> torch.Tensor | None:
        alpha = self.alpha()
        tables = []
        for name, part in self.components():
            table = part.static_table()
            if table is not None:
                weight = alpha.get(name)
                tables.append(table if weight is None else table * weight[:, None, None])
        return torch.stack(tables).sum(0) if tables else None

    def input_terms(
        self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions
    ) -> list[tuple[torch.Tensor | None, Logits]]:
        return self.terms(hidden_states, key_states, positions, [p for _, p in self.components() if not p.is_static])

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        return Sum(self.terms(hidden_states, key_states, positions, [part for _, part in self.components()]))

    def terms(
        self,
        hidden_states: torch.Tensor,
        key_states: torch.Tensor | None,
        positions: Positions,
        parts: list[Synthesizer],
    ) -> list[tuple[torch.Tensor | None, Logits]]:
        """Compute the weighted logits of these parts. Each gets its slice of the key states."""
        alpha = self.alpha()
        terms: list[tuple[torch.Tensor | None, Logits]] = []
        start = 0
        for name, part in self.components():
            states = None
            if part.key_width and key_states is not None:
                states = key_states[..., start : start + part.key_width]
                start += part.key_width
            if part in parts:
                # Called as a module, so that hooks for offloading load its parameters.
                terms.append(weighted(alpha.get(name), part(hidden_states, states, positions)))
        return terms
