"""Which queries, keys and values the stock forward projects if only some heads compare tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ...device.matmul import linear
from ...logits.forms import HeadPartition
from ...synthesizers import HeadGroups
from ...synthesizers.stock_weights import rows_of
from ..caching import Need
from ..finding.layer_classes import takes_fewer_heads
from ..finding.projections import fused_rows, head_rows, value_heads
from ..mixin import SynthesizerMixin
from .dot_product import StockDotProduct


class ComparedHeads(SynthesizerMixin):
    """A layer whose stock forward projects queries and keys for the heads that compare tokens, or for all heads if it must."""

    def keep_compared_heads(self) -> dict[str, nn.Module]:
        """Cut the query and key projections down to the heads that compare tokens, and to the keys of their groups.

        If one projection makes values too, the other heads get a projection of their values, which is returned by its name.
        """
        heads, names = self.dimensions[1], self.projection_names
        compared = sorted(head for part in self.stock_parts for head in part.heads)
        some = isinstance(self.synthesizer, HeadGroups) and 0 < len(compared) < heads
        self.__dict__["_compared"] = compared if some else list(range(heads))
        shared = heads // value_heads(self)
        self.__dict__["_kept_keys"] = sorted({head // shared for head in self.compared}) if some else None
        if not some or self.keeps_all_rows or not takes_fewer_heads(self):
            return {}
        if not names.fused:
            self._keep_rows(names.query, head_rows(self, compared))
            self._keep_rows(names.key, head_rows(self, self.kept_keys or []))
            return {}
        others = [head for head in range(heads) if head not in compared]
        self.__dict__["_values"] = HeadPartition([tuple(compared), tuple(others)])
        value_rows = fused_rows(self, names, ("value",), others)
        values = rows_of(cast(nn.Module, self._modules[names.fused]), value_rows).train(self.training)
        self._keep_rows(names.fused, fused_rows(self, names, ("query", "key", "value"), compared))
        return {names.value: values}

    def _keep_rows(self, name: str, rows: torch.Tensor) -> None:
        self._modules[name] = rows_of(cast(nn.Module, self._modules[name]), rows).train(self.training)

    def all_values(self, value: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The values (B, G, L, d_v) of all heads, if the stock forward has projected those of the comparing heads alone."""
        partition: HeadPartition | None = self.__dict__.get("_values")
        if partition is None or value.shape[1] != len(self.compared):
            return value
        projection = cast(nn.ModuleDict, self._modules["stock"])[self.projection_names.value]
        others = linear(projection, hidden_states).unflatten(-1, (len(partition.groups[1]), -1))
        return partition.join([value, others.transpose(1, 2)])

    def keys_of_needs(self, needs: Sequence[Need], key: torch.Tensor, shared: int) -> dict[str, Any]:
        """For each need the keys that it compares, and the numbers of all `key` (B, G', L, d_h): arguments of `drop_first`."""
        compared = [
            [head for part in need.synthesizer.modules() if isinstance(part, StockDotProduct) for head in part.heads]
            for need in needs
        ]
        key_heads = [tuple(dict.fromkeys(head // shared for head in heads)) for heads in compared]
        return {"key_heads": key_heads, "all_keys": self.kept_keys or range(key.shape[1])}

    @property
    def compared(self) -> list[int]:
        """The heads that compare tokens."""
        return self.__dict__["_compared"]

    @property
    def kept_keys(self) -> list[int] | None:
        """The indices, among the G groups of heads, of the keys of comparing heads; None if all heads compare tokens."""
        return self.__dict__["_kept_keys"]

    @property
    def stock_parts(self) -> list[StockDotProduct]:
        """The parts of the logits that the stock forward computes."""
        return [part for part in self.synthesizer.modules() if isinstance(part, StockDotProduct)]
