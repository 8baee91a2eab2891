"""The strips of the strips route: their sizes, their inputs and their output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from ..device.autocast import autocast_dtype
from ..logits.forms import Tiled, place_columns, place_table
from ..logits.masks import AttentionMask
from .randomness import generator_at
from .terms import StaticTerm, Terms

MOST_LOGITS = 1 << 25  # in one strip: 128 MB in float32; a few such tensors exist at once
SHORT_LENGTH = 512  # up to this length, all queries share a strip if MOST_LOGITS allows
QUERIES = 128  # in one strip of a longer sequence
FEWEST_QUERIES = 32  # in one strip; below this, a strip takes fewer heads instead

Tensors = Sequence[torch.Tensor | None]


class Strip(NamedTuple):
    """Heads and queries of all rows of the batch, and the number of keys up to the last that these queries see."""

    heads: slice
    queries: slice
    seen: int


def size_of_a_strip(batch: int, heads: int, query_length: int, key_length: int) -> tuple[int, int]:
    """(number of heads, number of queries) of a strip."""
    heads_together = max(1, min(heads, MOST_LOGITS // (batch * key_length * FEWEST_QUERIES)))
    most_queries = query_length if max(query_length, key_length) <= SHORT_LENGTH else QUERIES
    return heads_together, max(1, min(most_queries, MOST_LOGITS // (batch * heads_together * key_length)))


@dataclass(frozen=True)
class StripInputs:
    """The inputs of a strip, except for tensors with gradients: these are separate arguments, so that autograd sees them.

    The tensors' order: value (B, H, Lk, d_v), query (B, H, Lq, r), key (1 or B, H, Lk, r), key_bias (1 or B, H or 1, 1, Lk),
    then an inner and an outer for each tiled term, an explicit (1 or B, 1 or H, 1 or Lq, Lk) each, weight, table and keys of
    each static term, and for each placed term (weight, table, None) or (None, inner, outer).
    """

    batch: int
    heads: int
    query_length: int
    key_length: int
    tiled_terms: int
    explicit_terms: int
    static_terms: int
    term_positions: tuple[tuple[torch.Tensor | None, torch.Tensor], ...]
    """Positions of queries (B or 1, Lq) and of keys (B or 1, Lk), for each placed term."""
    keep: torch.Tensor | None
    causal_offset: int | torch.Tensor | None
    dropout: float
    state: torch.Tensor | None = None
    """State of the device's generator before the forward drew dropout."""

    @classmethod
    def of(
        cls, terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float
    ) -> tuple[StripInputs, list[torch.Tensor | None]]:
        """The inputs, and their tensors in order. Operands of matrix products are cast to autocast's dtype."""
        autocast_to = None if value.dtype == torch.float64 else autocast_dtype(value.device)
        if autocast_to is not None:
            value = value.to(autocast_to)
        query: torch.Tensor | None = None
        key: torch.Tensor | None = None
        if len(terms.low_rank) == 1:
            query, key = (factor.to(value.dtype) for factor in terms.low_rank[0])
        elif terms.low_rank:
            query, key = terms.joined_low_rank(value)
        tensors: list[torch.Tensor | None] = [value, query, key, terms.key_bias]
        for inner, outer, _ in terms.tiled:
            tensors += [inner, outer]
        tensors += terms.explicit
        for term in terms.static:
            factorized = autocast_to is not None and term.keys is not None
            tensors += term if not factorized else [term.weight, term.table.to(value.dtype), term.keys.to(value.dtype)]  # type: ignore[union-attr]
        for weight, placed in terms.placed:
            form = placed.form
            tensors += [None, form.inner, form.outer] if isinstance(form, Tiled) else [weight, form.table, None]
        strip_inputs = cls(
            batch=len(value),
            heads=value.shape[1],
            query_length=terms.query_length,
            key_length=value.shape[-2],
            tiled_terms=len(terms.tiled),
            explicit_terms=len(terms.explicit),
            static_terms=len(terms.static),
            term_positions=tuple((term.query, term.key) for _, term in terms.placed),
            keep=mask.keep,
            causal_offset=mask.causal_offset,
            dropout=dropout,
        )
        return strip_inputs, tensors

    @property
    def first_explicit(self) -> int:
        return 4 + 2 * self.tiled_terms

    @property
    def first_static(self) -> int:
        return self.first_explicit + self.explicit_terms

    @property
    def first_placed(self) -> int:
        return self.first_static + 3 * self.static_terms

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A generator that repeats the forward's draws; None (the device's default) in the forward itself."""
        return None if self.state is None else generator_at(device, self.state)

    def strips(self) -> Iterator[Strip]:
        """All strips, ordered by heads, then by queries."""
        heads_together, rows = size_of_a_strip(self.batch, self.heads, self.query_length, self.key_length)
        for head in range(0, self.heads, heads_together):
            for start in range(0, self.query_length, rows):
                stop = min(start + rows, self.query_length)
                seen = self.key_length
                if isinstance(self.causal_offset, int):
                    seen = max(1, min(seen, stop + self.causal_offset))
                yield Strip(slice(head, min(head + heads_together, self.heads)), slice(start, stop), seen)

    def part_of(self, number: int, tensor: torch.Tensor, tensors: Tensors, strip: Strip) -> tuple[slice, ...]:
        """The index of a strip's part of a tensor, as slices."""
        everything, keys = slice(None), slice(strip.seen)
        if number in (0, 2):
            return everything, strip.heads, keys
        if number == 1:
            return everything, strip.heads, strip.queries
        if 4 <= number < self.first_explicit:
            inner = cast(torch.Tensor, tensors[number - number % 2])
            columns = everything if number % 2 == 0 else slice(-(-strip.seen // inner.shape[-1]))
            return everything, strip.heads, strip.queries, columns
        if number < self.first_static:  # broadcasts to the logits
            heads = strip.heads if tensor.shape[1] > 1 else everything
            queries = strip.queries if tensor.shape[2] > 1 else everything
            return everything, heads, queries, keys
        kind = (number - self.first_static) % 3
        if number >= self.first_placed and tensor.dim() == 4:  # a factor of an outer product
            return everything, strip.heads, strip.queries
        heads = strip.heads if len(tensor) > 1 else everything
        if number >= self.first_placed:
            return (heads,)
        if kind == 0:
            return (heads,)
        if kind == 2:
            return heads, keys
        factorized = tensors[number + 1] is not None
        return (heads, strip.queries) if factorized else (heads, strip.queries, keys)

    def placed_logits(
        self, strip: Strip, term: Tensors, query: torch.Tensor | None, key: torch.Tensor
    ) -> torch.Tensor:
        """The logits (B, g, rows, seen) of a placed term."""
        weight, first, outer = term
        key, first = key[:, : strip.seen], cast(torch.Tensor, first)
        if outer is not None:
            return place_columns(first, outer, key)
        logits = place_table(first, cast(torch.Tensor, query)[:, strip.queries], key)
        return logits if weight is None else logits * weight.to(logits.dtype)[:, None, None]

    def covers_all_logits(self, strip: Strip) -> bool:
        """Whether this is the only strip."""
        return (strip.heads, strip.queries) == (slice(0, self.heads), slice(0, self.query_length))

    def has_disjoint_parts(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether each number of a tensor belongs to one strip only."""
        if number < self.first_static:
            return number == 1 or (number > 3 and min(tensor.shape[1:3]) > 1)
        if number >= self.first_placed:
            return tensor.dim() == 4
        return (number - self.first_static) % 3 == 1 and len(tensor) == self.heads

    def pieces(self, strip: Strip, tensors: Tensors) -> list[torch.Tensor | None]:
        """A strip's parts of the tensors, as views."""
        return [
            None if tensor is None else tensor[self.part_of(number, tensor, tensors, strip)]
            for number, tensor in enumerate(tensors)
        ]

    def strip_output(self, strip: Strip, pieces: Tensors, generator: torch.Generator | None) -> torch.Tensor:
        """The output (B, g, rows, d_v) of a strip."""
        value = cast(torch.Tensor, pieces[0])
        scores = self.logits(strip, pieces)
        visible = self.visible(strip, scores.device)
        if visible is not None:
            # The dtype's minimum, not −inf: the gradient of a row of only −inf is NaN.
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(value.dtype).expand(self.batch, -1, -1, -1)
        if self.dropout:
            kept = torch.empty_like(weights, memory_format=torch.contiguous_format)
            weights = weights * kept.bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)
        output = weights @ value
        return output if visible is None else output.masked_fill(~visible.any(-1, keepdim=True), 0.0)

    def visible(self, strip: Strip, device: torch.device) -> torch.Tensor | None:
        """True where a query of a strip sees a key, broadcasts to (B, g, rows, seen); None if all see all."""
        keep = self.keep
        if keep is not None:
            keep = keep[
                :,
                strip.heads if keep.shape[1] > 1 else slice(None),
                strip.queries if keep.shape[2] > 1 else slice(None),
                : strip.seen,
            ]
        if self.causal_offset is None:
            return keep
        last = torch.arange(strip.queries.start, strip.queries.stop, device=device)[:, None] + self.causal_offset
        past = (torch.arange(strip.seen, device=device) <= last)[None, None]
        return past if keep is None else keep & past

    def logits(self, strip: Strip, pieces: Tensors) -> torch.Tensor:
        """The logits of a strip, in at least float32: (1 or B, g, rows, seen)."""
        value, query, key, key_bias = pieces[:4]
        wide = torch.promote_types(cast(torch.Tensor, value).dtype, torch.float32)
        parts = []
        if query is not None and key is not None:
            parts.append(query @ key.transpose(-1, -2))
        for number in range(4, self.first_explicit, 2):
            inner, outer = cast(torch.Tensor, pieces[number]), cast(torch.Tensor, pieces[number + 1])
            parts.append((outer.unsqueeze(-1) * inner.unsqueeze(-2)).flatten(-2)[..., : strip.seen])
        for number in range(self.first_static, self.first_placed, 3):
            term = StaticTerm(*pieces[number : number + 3])  # type: ignore[arg-type]
            parts.append(term.materialize().unsqueeze(0))
        for number, term_positions in enumerate(self.term_positions):
            start = self.first_placed + 3 * number
            parts.append(self.placed_logits(strip, pieces[start : start + 3], *term_positions))
        parts += cast(list[torch.Tensor], pieces[self.first_explicit : self.first_static])
        if key_bias is not None:
            parts.append(key_bias)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part
        rows, heads = strip.queries.stop - strip.queries.start, strip.heads.stop - strip.heads.start
        return total.expand(-1, heads, rows, -1)
