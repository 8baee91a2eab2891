"""Logits as a sum of terms of each kind: what the routes choose by. `KernelTerms` is what they compute with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.forms import Explicit, KeyBias, Logits, LowRank, Placed, Static, StaticWeights, Sum, Tiled
from ..logits.masks import AttentionMask
from ..logits.relative import Relative, counts_indices


class StaticTerm(NamedTuple):
    """`weight · table`, or `weight · table · keysᵀ`, the same for each row of the batch."""

    weight: torch.Tensor | None
    """(H,), or None for 1."""
    table: torch.Tensor
    """(H or 1, Lq, Lk); with `keys`, (H or 1, Lq, k)."""
    keys: torch.Tensor | None = None
    """(H or 1, Lk, k)."""


class AddedTerm(NamedTuple):
    """`weight · tensor`, a term that is there as a tensor: a number for each key, or for each distance."""

    tensor: torch.Tensor
    """(1 or B, 1 or H, 1 or Lq, Lk); by distance, (1 or B, 1 or H, 1 or Lq, columns)."""
    weight: torch.Tensor | None
    """(H,), or None for 1."""
    zero: int | None = None
    """The column of distance 0; None for a number for each key. The first and last column serve all farther keys."""


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


class PlacedTerm(NamedTuple):
    """A `Placed` form: `weight · table`, or the columns of the outer product of `table` and `outer`."""

    weight: torch.Tensor | None
    """(H,), or None for 1."""
    table: torch.Tensor
    """(H or 1, N, N); with `outer`, the inner factor (B, H, Lq, a)."""
    outer: torch.Tensor | None
    """(B, H, Lq, b)."""
    key: torch.Tensor
    """Positions (B or 1, Lk)."""
    query: torch.Tensor | None
    """Positions (B or 1, Lq); None beside `outer`."""


@dataclass
class Terms:
    """The terms whose sum is the logits. Weights are multiplied in where that is cheap.

    Attributes:
        static: static terms. They keep their weights, because a weighted table would be a copy of the table.
        low_rank: pairs of queries (B, H, Lq, r) and keys (1 or B, H, Lk, r).
        tiled: pairs of inner (B, H, Lq, a) and outer (B, H, Lq, b).
        weights: known softmax weights, if there is no other term than key biases; else they become logits in `static`.
        key_bias: (1 or B, H or 1, 1, Lk) or None.
        explicit: tensors (1 or B, 1 or H, 1 or Lq, Lk).
        relative: terms by distance, where distances are differences of indices; elsewhere they are in `static` or
            `explicit`.
        placed: placed terms; on a processor and in a traced graph they are in `explicit`.
        query_length: Lq.
    """

    static: list[StaticTerm] = field(default_factory=list)
    low_rank: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tiled: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    weights: StaticWeights | None = None
    key_bias: torch.Tensor | None = None
    explicit: list[torch.Tensor] = field(default_factory=list)
    placed: list[PlacedTerm] = field(default_factory=list)
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
            self.tiled.append((scaled(term.inner), term.outer))
        elif isinstance(term, Placed) and not (traced() or on_processor(term.key.device)):
            form = term.form
            if isinstance(form, Tiled):
                self.placed.append(PlacedTerm(None, scaled(form.inner), form.outer, term.key, None))
            else:
                self.placed.append(PlacedTerm(weight, form.table, None, term.key, term.query))
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
        if isinstance(start, int) and counts_indices(term.positions, mask):
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
        if logits.shape[0] == 1:  # not len(): a graph would keep it as a constant
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

    @property
    def is_low_rank(self) -> bool:
        """Whether all terms are low-rank or key biases."""
        return bool(self.low_rank) and not (self.static or self.tiled or self.explicit or self.placed or self.relative)

    def added(self) -> list[AddedTerm]:
        """Key bias, explicit terms, whole tables and terms by distance, which come last."""
        added = [] if self.key_bias is None else [AddedTerm(self.key_bias, None)]
        added += [AddedTerm(explicit, None) for explicit in self.explicit]
        added += [AddedTerm(term.table.unsqueeze(0), term.weight) for term in self.static if term.keys is None]
        return added + [AddedTerm(term.rows, term.weight, term.form.max_distance) for term in self.relative]

    def factors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of all products: low-rank terms (B, H, L, r), factorized tables (1, H or 1, L, k)."""
        pairs = list(self.low_rank)
        for weight, table, keys in self.static:
            if keys is not None:
                table = table if weight is None else table * weight.to(table.dtype)[:, None, None]
                pairs.append((table.unsqueeze(0), keys.unsqueeze(0)))
        return pairs
