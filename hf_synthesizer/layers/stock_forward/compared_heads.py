"""Where some heads alone compare tokens, and the stock forward makes their dot products: what it then projects, and what not."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ...device.matmul import linear
from ...logits.forms import HeadPartition
from ...synthesizers import HeadGroups
from ...synthesizers.stock_weights import rows_of
from ..finding.layer_classes import takes_fewer_heads
from ..finding.projections import fused_rows, head_rows, value_heads
from ..mixin import SynthesizerMixin
from .dot_product import StockDotProduct


class ComparedHeads(SynthesizerMixin):
    """A layer whose stock forward makes queries and keys for the heads that compare tokens, of all heads where it must."""

    def keep_compared_heads(self) -> dict[str, nn.Module]:
        """Cut the query and key projections down to the heads that compare tokens, and their groups' keys.

        Where one projection makes values too, those of the other heads get one of their own, which is returned by its name.
        """
        compared = sorted(head for part in self.stock_parts for head in part.heads)
        some = isinstance(self.synthesizer, HeadGroups) and 0 < len(compared) < self.dimensions[1]
        self.__dict__["_compared"] = compared if some else list(range(self.dimensions[1]))
        shared = self.dimensions[1] // value_heads(self)
        self.__dict__["_kept_keys"] = sorted({head // shared for head in self.compared}) if some else None
        if not some or self.whole or not takes_fewer_heads(self):
            return {}
        if self.projection_names.fused:
            others = [head for head in range(self.dimensions[1]) if head not in compared]
            self.__dict__["_values"] = HeadPartition([tuple(compared), tuple(others)])
            projection = cast(nn.Module, self._modules[self.projection_names.fused])
            own = fused_rows(self, self.projection_names, ("query", "key", "value"), compared)
            values = fused_rows(self, self.projection_names, ("value",), others)
            self._modules[self.projection_names.fused] = rows_of(projection, own).train(self.training)
            return {self.projection_names.value: rows_of(projection, values).train(self.training)}
        for name, heads in (
            (self.projection_names.query, compared),
            (self.projection_names.key, self.kept_keys or []),
        ):
            projection = cast(nn.Module, self._modules[name])
            self._modules[name] = rows_of(projection, head_rows(self, heads)).train(self.training)
        return {}

    def all_values(self, value: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The values (B, G, L, d_v) of all heads, where the stock forward has made those of the comparing heads alone."""
        partition: HeadPartition | None = self.__dict__.get("_values")
        if partition is None or value.shape[1] != len(self.compared):
            return value
        stock = cast(nn.ModuleDict, self._modules["stock"])
        others = linear(stock[self.projection_names.value], hidden_states).unflatten(
            -1, (len(partition.groups[1]), -1)
        )
        return partition.join([value, others.transpose(1, 2)])

    @property
    def compared(self) -> list[int]:
        """The heads that compare tokens."""
        return self.__dict__["_compared"]

    @property
    def kept_keys(self) -> list[int] | None:
        """Where not all heads compare tokens: which of the stock layer's keys those heads have, of G groups of heads."""
        return self.__dict__["_kept_keys"]

    @property
    def stock_parts(self) -> list[StockDotProduct]:
        """What the stock forward makes of the logits."""
        return [part for part in self.synthesizer.modules() if isinstance(part, StockDotProduct)]
