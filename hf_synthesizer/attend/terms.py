"""Logits as a sum of terms of each kind: the input of all fast routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..device.matmul import product
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.forms import Explicit, KeyBias, Logits, LowRank, Placed, Static, StaticWeights, Sum, Tiled
from ..logits.masks import AttentionMask
from ..logits.relative import Relative


class StaticTerm(NamedTuple):
    """`weight · table`, or `weight · table · keysᵀ`, the same for each row of the batch."""

    weight: torch.Tensor | None
    """(H,), or None for 1."""
    table: torch.Tensor
    """(H or 1, Lq, Lk); with `keys`, (H or 1, Lq, k)."""
    keys: torch.Tensor | None = None
    """(H or 1, Lk, k)."""

    def table_heads(self, heads: slice) -> slice:
        """The index of these heads in the table; a single head serves all."""
        return heads if len(self.table) > 1 else slice(0, 1)

    def tile(self, heads: slice, queries: slice, seen: int) -> torch.Tensor:
        """A tile without the weight: (g or 1, rows, seen). Not differentiable: call it inside an `autograd.Function`."""
        rows = self.table[self.table_heads(heads), queries]
        if self.keys is None:
            return rows[..., :seen]
        return product(rows, self.keys[self.table_heads(heads), :seen].transpose(-1, -2))

    def materialize(self) -> torch.Tensor:
        """The whole term, (H or 1, Lq, Lk)."""
        table = self.table if self.keys is None else self.table @ self.keys.transpose(-1, -2)
        return table if self.weight is None else table * self.weight.to(table.dtype)[:, None, None]

    def spread(self) -> float:
        """An upper bound of max − min over the term's numbers."""
        table = self.table.detach()
        if self.keys is None:
            low, high = torch.aminmax(table)
            apart = float(high - low)
        else:  # |a · b| ≤ |a| · |b|
            longest = [factor.detach().float().norm(dim=-1).amax(-1) for factor in (table, self.keys)]
            apart = 2 * float((longest[0] * longest[1]).max())
        return apart if self.weight is None else apart * float(self.weight.detach().abs().max())


class RelativeTerm(NamedTuple):
    """`weight · rows[clip(j − i, −D, D) + D]`, where i is the index of a query, `start` more than its number."""

    weight: torch.Tensor | None
    """(H,), or None for 1."""
    form: Relative
    start: int

    @property
    def rows(self) -> torch.Tensor:
        """(B or 1, H or 1, Lq or 1, D + 1 or 2·D + 1), without the weight."""
        return self.form.rows

    def logits(self, heads: int) -> torch.Tensor:
        """The logits by distance of rows that don't depend on the query: (H, D + 1 or 2·D + 1)."""
        logits = self.rows[0, :, 0].expand(heads, -1)
        return logits if self.weight is None else logits * self.weight.to(logits.dtype)[:, None]

    def spread(self) -> float:
        """An upper bound of max − min over a row's logits."""
        low, high = torch.aminmax(self.rows.detach(), dim=-1)
        apart = float((high - low).max())
        return apart if self.weight is None else apart * float(self.weight.detach().abs().max())


def static_terms(tensors: Sequence[torch.Tensor | None]) -> list[StaticTerm]:
    """[weight, table, keys, weight, table, keys, …] → terms."""
    return [StaticTerm(*tensors[start : start + 3]) for start in range(0, len(tensors), 3)]  # type: ignore[arg-type]


@dataclass
class Terms:
    """The terms whose sum is the logits. Weights are multiplied in where that is cheap.

    Attributes:
        static: static terms. They keep their weights, because a weighted table would be a copy of the table.
        low_rank: pairs of queries (B, H, Lq, r) and keys (1 or B, H, Lk, r).
        tiled: triples of inner (B, H, Lq, a), outer (B, H, Lq, b) and key length.
        weights: known softmax weights, if there is no other term than key biases; else they become logits in `static`.
        key_bias: (1 or B, H or 1, 1, Lk) or None.
        explicit: tensors (1 or B, 1 or H, 1 or Lq, Lk).
        placed: placed tables (weight, form) and placed outer products (None, form); on a processor and in a traced graph
            they are in `explicit`.
        query_length: Lq.
    """

    static: list[StaticTerm] = field(default_factory=list)
    low_rank: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tiled: list[tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    weights: StaticWeights | None = None
    key_bias: torch.Tensor | None = None
    explicit: list[torch.Tensor] = field(default_factory=list)
    placed: list[tuple[torch.Tensor | None, Placed]] = field(default_factory=list)
    relative: list[RelativeTerm] = field(default_factory=list)
    query_length: int = 1

    @classmethod
    def of(cls, logits: Logits, mask: AttentionMask) -> Terms:
        """The terms of a form and of the mask's additive bias."""
        terms = cls()
        for weight, term in logits.terms if isinstance(logits, Sum) else [(None, logits)]:
            if isinstance(term, Relative):
                terms.add_relative(weight, term, mask)
            else:
                terms.add(weight, term)
        if mask.bias is not None:
            terms.add_bias(mask.bias)
        if terms.static or terms.low_rank or terms.tiled or terms.explicit or terms.placed:
            terms.materialize_weights()
        return terms

    def materialize_weights(self) -> None:
        """Turn known weights into static logits, for routes that need logits."""
        if self.weights is not None:
            self.static.append(StaticTerm(None, self.weights.materialize()[0]))
            self.weights = None

    def add(self, weight: torch.Tensor | None, term: Logits) -> None:
        """Add `weight` (H,) times a term."""
        self.query_length = max(self.query_length, term.query_length)

        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if weight is None else tensor * weight.to(tensor.dtype)[:, None, None]

        if isinstance(term, Static):
            self.static.append(StaticTerm(weight, term.table, term.keys))
        elif isinstance(term, StaticWeights) and weight is None and self.weights is None:
            self.weights = term
        elif isinstance(term, LowRank):
            term = term if weight is None else term.scaled(weight)
            self.low_rank.append((term.query, term.key))
            if term.key_bias is not None:
                self.add_key_bias(term.key_bias.unsqueeze(-2))
        elif isinstance(term, Tiled):
            self.tiled.append((scaled(term.inner), term.outer, term.key_length))
        elif isinstance(term, Placed) and not (traced() or on_processor(term.key.device)):
            if isinstance(term.form, Tiled):
                columns = Tiled(scaled(term.form.inner), term.form.outer, term.form.key_length)
                self.placed.append((None, Placed(columns, term.key)))
            else:
                self.placed.append((weight, term))
        elif isinstance(term, KeyBias):
            self.add_key_bias(scaled(term.bias))
        elif isinstance(term, Explicit):
            self.explicit.append(scaled(term.logits))
        else:
            self.explicit.append(scaled(term.materialize()))

    def add_relative(self, weight: torch.Tensor | None, term: Relative, mask: AttentionMask) -> None:
        """Add `weight` (H,) times logits by distance. The logits of the sinks are key biases."""
        self.query_length = max(self.query_length, term.query_length)
        term = term.with_mask(mask)
        bias = term.sink_bias()
        if bias is not None:
            self.add_key_bias(bias if weight is None else bias * weight.to(bias.dtype)[:, None, None])
        start = term.positions.start
        if isinstance(start, int) and term.counts_indices(mask):
            self.relative.append(RelativeTerm(weight, term, start))
        else:
            self._materialize_relative(weight, term)

    def materialize_relative(self) -> None:
        """Turn logits by distance into static or explicit ones, for routes that don't know distances."""
        for term in self.relative:
            self._materialize_relative(term.weight, term.form)
        self.relative = []

    def _materialize_relative(self, weight: torch.Tensor | None, form: Relative) -> None:
        logits = form.by_distance()
        if len(logits) == 1:
            self.static.append(StaticTerm(weight, logits[0]))
        else:
            self.explicit.append(logits if weight is None else logits * weight.to(logits.dtype)[:, None, None])

    def add_key_bias(self, bias: torch.Tensor) -> None:
        self.key_bias = bias if self.key_bias is None else self.key_bias + bias

    def add_bias(self, bias: torch.Tensor) -> None:
        """Add a mask's bias: as key bias, static or explicit term, by its shape."""
        if bias.shape[-2] == 1:
            self.add_key_bias(bias)
        elif bias.shape[0] == 1:
            self.static.append(StaticTerm(None, bias[0]))
        else:
            self.explicit.append(bias)

    def joined_low_rank(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, H, Lq, Σr) and keys (B, H, Lk, Σr) of all low-rank terms, concatenated, in the values' dtype."""
        batch = value.shape[0]
        queries = [query.to(value.dtype) for query, _ in self.low_rank]
        keys = [key.to(value.dtype).expand(batch, -1, -1, -1) for _, key in self.low_rank]
        return (queries[0], keys[0]) if len(keys) == 1 else (torch.cat(queries, dim=-1), torch.cat(keys, dim=-1))

    def joined_with_factors(self, value: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`joined_low_rank`, with the factors of static terms as further queries and keys.

        Keys are (1, H, Lk, Σr) if all of them are the same for the batch. (None, None) if there are no such terms.
        """
        batch, heads = value.shape[:2]
        queries, keys = [query for query, _ in self.low_rank], [key for _, key in self.low_rank]
        for term in self.static:
            if term.keys is not None:
                table = term.table
                if term.weight is not None:
                    table = table * term.weight.to(table.dtype)[:, None, None]
                queries.append(table.expand(heads, -1, -1)[None])
                keys.append(term.keys.expand(heads, -1, -1)[None])
        if not queries:
            return None, None
        shared = all(key.shape[0] == 1 for key in keys)
        queries = [query.to(value.dtype).expand(batch, -1, -1, -1) for query in queries]
        keys = [key.to(value.dtype).expand(1 if shared else batch, -1, -1, -1) for key in keys]
        return (queries[0], keys[0]) if len(keys) == 1 else (torch.cat(queries, -1), torch.cat(keys, -1))

    def joined_bias(self) -> torch.Tensor | None:
        """The sum of all terms but the low-rank ones, broadcasts to (B, H, Lq, Lk), or None."""
        total = self.key_bias
        for term in self.static:
            total = _add_term(total, term.materialize().unsqueeze(0))
        for inner, outer, key_length in self.tiled:
            total = _add_term(total, Tiled(inner, outer, key_length).materialize())
        for explicit in self.explicit:
            total = _add_term(total, explicit)
        return total


def _add_term(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term
