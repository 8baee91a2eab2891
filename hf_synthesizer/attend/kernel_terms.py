"""The logits as kernels and chunks read them: one product, outer products, placed terms and added tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ..device.matmul import product
from ..device.tracing import traced
from ..logits.forms import Tiled, place_columns, place_table
from ..logits.positions import rows_in
from .terms import AddedTerm, PlacedTerm, Terms

Tensors = Sequence[torch.Tensor | None]


class Counts(NamedTuple):
    """The numbers of terms, the column of distance 0 of each added term, and the index of the first query."""

    outer_products: int
    placed: int
    zeros: tuple[int | None, ...]
    start: int


class KernelTerms(NamedTuple):
    """`query · keyᵀ` + outer products + placed terms + added tensors.

    Attributes:
        query: (1 or B, 1 or H, Lq, r), or None without a product.
        key: (1 or B, 1 or H, Lk, r), or None.
        outer_products: pairs of inner (1 or B, H, Lq, a) and outer (1 or B, H, Lq, b).
        placed: terms whose positions differ between rows of the batch.
        added: tensors with their weights. Those by distance come last.
        start: the index of the first query among the keys, for terms by distance.
    """

    query: torch.Tensor | None
    key: torch.Tensor | None
    outer_products: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    placed: Sequence[PlacedTerm] = ()
    added: Sequence[AddedTerm] = ()
    start: int = 0

    @classmethod
    def of(cls, terms: Terms, value: torch.Tensor) -> KernelTerms:
        """The terms, with all low-rank terms and factorized tables as one product in the values' dtype."""
        factors = terms.factors()
        query, key = joined_factors(factors, value) if factors else (None, None)
        start = terms.relative[0].start if terms.relative else 0
        return cls(query, key, terms.tiled, terms.placed, terms.added(), start)

    @property
    def counts(self) -> Counts:
        """What `from_tensors` needs to invert `tensors`."""
        zeros = tuple(term.zero for term in self.added)
        return Counts(len(self.outer_products), len(self.placed), zeros, self.start)

    def tensors(self) -> list[torch.Tensor | None]:
        """All tensors in a fixed order, as arguments of an `autograd.Function`."""
        return [
            self.query,
            self.key,
            *chain(*self.outer_products),
            *chain(*self.placed),
            *chain(*(term[:2] for term in self.added)),
        ]

    @classmethod
    def from_tensors(cls, tensors: Tensors, counts: Counts) -> KernelTerms:
        query, key, *others = tensors
        placed = 2 * counts.outer_products
        added = placed + len(PlacedTerm._fields) * counts.placed
        return cls(
            query,
            key,
            [(others[n], others[n + 1]) for n in range(0, placed, 2)],  # type: ignore[misc]
            [PlacedTerm(*others[n : n + 5]) for n in range(placed, added, 5)],  # type: ignore[arg-type]
            [
                AddedTerm(others[n], others[n + 1], zero)  # type: ignore[arg-type]
                for n, zero in zip(range(added, len(others), 2), counts.zeros, strict=True)
            ],
            counts.start,
        )

    def dimensions(self) -> list[str]:
        """What the dimensions of each tensor are: b rows of the batch, h heads, q queries, k keys, and . for others."""
        names = ["bhq.", "bhk.", *("bhq.", "bhq.") * len(self.outer_products)]
        for term in self.placed:
            names += ["h", "h.." if term.outer is None else "bhq.", "bhq.", "bk", "bq"]
        for added in self.added:
            names += ["bhqk" if added.zero is None else "bhq.", "h"]
        return names

    @property
    def has_distances(self) -> bool:
        """Whether there are terms by distance."""
        return any(term.zero is not None for term in self.added)

    def distances(self, query_length: int, key_length: int, device: torch.device) -> torch.Tensor:
        """j − i for all keys j and all queries i, (Lq, Lk)."""
        query = torch.arange(query_length, device=device)[:, None] + self.start
        return torch.arange(key_length, device=device) - query

    def logits(self, key_length: int, distances: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
        """The sum of all terms, (1 or B, 1 or H, 1 or Lq, Lk), and whether its memory is new and may be written to.

        Terms by distance need the `distances` j − i of the pairs, (Lq, Lk).
        """
        in_place = not (torch.is_grad_enabled() or traced())
        total: torch.Tensor | None = None
        is_new = False
        for term, weight, term_is_new in self._terms(key_length, distances):
            factor = None if weight is None else weight.to(term.dtype)[:, None, None]
            if total is None:
                total, is_new = (term, term_is_new) if factor is None else (term * factor, True)
            elif in_place and is_new and can_hold(total, term) and (factor is None or can_hold(total, factor)):
                total = total.add_(term) if factor is None else total.addcmul_(term, factor)
            else:
                total, is_new = total + (term if factor is None else term * factor), True
        assert total is not None
        return total, is_new

    def _terms(
        self, key_length: int, distances: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, bool]]:
        """(tensor, weight, whether its memory is new) of each term."""
        if self.query is not None and self.key is not None:
            yield product(self.query, self.key.transpose(-1, -2)), None, True
        for inner, outer in self.outer_products:
            if not traced():
                outer = outer[..., : -(-key_length // inner.shape[-1])]
            yield Tiled(inner, outer, key_length).materialize(), None, True
        for weight, table, outer_factor, key, query in self.placed:
            if outer_factor is not None:
                yield place_columns(table, outer_factor, key), None, True
            elif query is not None:
                yield place_table(table, query, key), weight, True
        for tensor, weight, zero in self.added:
            if zero is None:
                yield tensor, weight, False
                continue
            assert distances is not None
            columns = (distances + zero).clamp(0, tensor.shape[-1] - 1)  # (q, k)
            rows = tensor.expand(-1, -1, len(columns), -1)
            yield rows.gather(-1, columns.expand(*rows.shape[:2], -1, -1)), weight, True


def joined_factors(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]], value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of several products, concatenated to those of one, in the values' dtype."""
    queries, keys = ([tensor.to(value.dtype) for tensor in tensors] for tensors in zip(*factors, strict=True))
    if len(factors) == 1:
        return queries[0], keys[0]
    joined = []
    for tensors in (queries, keys):
        batch = rows_in(*tensors)
        joined.append(torch.cat([tensor.expand(batch, value.shape[1], -1, -1) for tensor in tensors], dim=-1))
    return joined[0], joined[1]


def can_hold(total: torch.Tensor, term: torch.Tensor) -> bool:
    """Whether a sum or a mask with `term` has the shape of `total`, and no wider dtype."""
    return all(one in (1, size) for one, size in zip(term.shape[::-1], total.shape[::-1], strict=False)) and (
        term.dtype in (total.dtype, torch.bool)
    )
