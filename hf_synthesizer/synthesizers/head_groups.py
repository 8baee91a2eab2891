"""Layers with a different synthesizer for each group of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import nn

from ..logits.forms import Grouped, HeadPartition, Logits
from ..logits.positions import Positions
from .base import Synthesizer
from .config import HeadGroupsConfig, SynthesizerConfig
from .registry import get_variant
from .stock_weights import rows_of

STOCK = "stock"
"""The name of the group that keeps stock attention. The others are named 0, 1, …"""


class HeadGroups(Synthesizer):
    """`S[h] = S_g[h]` for the heads h of group g. Heads in no group keep the stock logits.

    Each group is an ordinary synthesizer for its number of heads. The widths of the groups' key states differ, so all
    key states are concatenated as those of one head: (B, 1, L, Σ_g H_g · width_g).
    """

    formula = "S_g[h, i, j] for the heads h of group g"
    parameter_formula = "Σ"
    limits_reach = False  # each group has its own window
    config: HeadGroupsConfig  # type: ignore[assignment]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        config: HeadGroupsConfig,
        *,
        head_dim: int | None = None,
        build: Callable[..., Synthesizer],
    ):
        """`build` builds the synthesizer of one group (`build_synthesizer`)."""
        super().__init__(hidden_size, num_heads, max_length, config, head_dim=head_dim)  # type: ignore[arg-type]
        group_configs = [(str(number), group) for number, group in enumerate(config.groups)]
        if config.stock_heads:
            group_configs.append(
                (STOCK, SynthesizerConfig("dot_product", max_length=max_length or None, heads=config.stock_heads))
            )
        self.groups = nn.ModuleDict(
            {
                name: build(group, hidden_size, len(group.heads or ()), max_length, head_dim=self.head_dim)
                for name, group in group_configs
            }
        )
        self.heads = HeadPartition([group.heads or () for _, group in group_configs])

    def members(self) -> Iterator[tuple[str, tuple[int, ...], Synthesizer]]:
        """Yield the name, heads and synthesizer of each group."""
        for (name, group), heads in zip(self.groups.items(), self.heads.groups, strict=True):
            yield name, heads, cast(Synthesizer, group)

    @property
    def key_width(self) -> int:
        return sum(len(heads) * group.key_width for _, heads, group in self.members())

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        """Give each group that uses the stock projections the rows of its heads."""
        for _, heads, group in self.members():
            if any(get_variant(part).load_stock is not Synthesizer.load_stock for part in group.config.parts):
                rows = (torch.tensor(heads)[:, None] * self.head_dim + torch.arange(self.head_dim)).flatten()
                group.load_stock(rows_of(query, rows), rows_of(key, rows), scaling)

    def set_causal(self, causal: bool) -> None:
        self.causal = causal
        for _, _, group in self.members():
            group.set_causal(causal)

    def start_at_zero(self) -> None:
        for _, _, group in self.members():
            group.start_at_zero()

    def reset_parameters(self) -> None:
        for _, _, group in self.members():
            group.reset_parameters()

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        projected = [group.project_keys(hidden_states) for _, _, group in self.members()]
        flat = [states.transpose(1, 2).flatten(2) for states in projected if states is not None]  # (B, L, H_g · w_g)
        if not flat:
            return None
        return (flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)).unsqueeze(1)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        logits, start = [], 0
        for _, heads, group in self.members():
            states, width = None, len(heads) * group.key_width
            if width and key_states is not None:
                states = key_states[:, 0, :, start : start + width].unflatten(-1, (len(heads), -1)).transpose(1, 2)
                start += width  # states: (B, H_g, L, w_g)
            logits.append(group(hidden_states, states, positions))  # called as a module: see `Synthesizer`
        return Grouped(self.heads, logits)
