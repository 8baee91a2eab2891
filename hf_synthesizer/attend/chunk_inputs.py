"""The chunks of the chunked route: their sizes, their inputs and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from ..device.processor import on_processor
from ..logits.masks import AttentionMask
from .kernel_terms import Counts, KernelTerms, Tensors, can_hold
from .randomness import draw_seed, dropout_factors, generator_from
from .terms import Terms

# On a processor, where a chunk has to fit the cache:
PROCESSOR_QUERIES = 512  # of one head; with fewer, matrix products are slow; with more, a chunk does not fit
PROCESSOR_LOGITS = 1 << 18  # of several heads of short sequences
FEWEST_HEADS = 4  # with fewer heads than this in a chunk, one head at a time takes the faster matrix product
WIDEST_VALUES = 256  # beyond, each head is a large product of its own

# On other devices:
MOST_LOGITS = 1 << 25  # in one chunk: 128 MB in float32; a few such tensors exist at once
SHORT_LENGTH = 512  # up to this length, all queries share a chunk if MOST_LOGITS allows
QUERIES = 128  # in one chunk of a longer sequence
FEWEST_QUERIES = 32  # in one chunk; below this, a chunk takes fewer heads instead

ALL = slice(None)


class ChunkSize(NamedTuple):
    """The numbers of rows of the batch, heads and queries in one chunk."""

    rows: int
    heads: int
    queries: int

    @classmethod
    def of(cls, value: torch.Tensor, query_length: int, same_ends: bool) -> ChunkSize:
        """The size for values (B, H, Lk, d_v). `same_ends` says that all rows of the batch have the same last key."""
        batch, heads, key_length, width = (max(1, size) for size in value.shape)
        if not on_processor(value.device):
            heads_together = max(1, min(heads, MOST_LOGITS // (batch * key_length * FEWEST_QUERIES)))
            queries = query_length if max(query_length, key_length) <= SHORT_LENGTH else QUERIES
            return cls(
                batch, heads_together, max(1, min(queries, MOST_LOGITS // (batch * heads_together * key_length)))
            )
        heads_together = PROCESSOR_LOGITS // (query_length * key_length)
        if heads_together < FEWEST_HEADS or width > WIDEST_VALUES:
            return cls(1, 1, PROCESSOR_QUERIES)
        rows = heads_together // heads if same_ends else 1
        return cls(max(1, min(batch, rows)), min(heads, heads_together), query_length)


class Chunk(NamedTuple):
    """Rows of the batch, heads, queries, and the number of keys up to the last that these queries see."""

    rows: slice
    heads: slice
    queries: slice
    seen: int

    def part_of(self, tensor: torch.Tensor, dimensions: str) -> tuple[slice, ...]:
        """The index of this chunk's part of a tensor (see `KernelTerms.dimensions`). A dimension of size 1 serves all."""
        slices = {"b": self.rows, "h": self.heads, "q": self.queries, "k": slice(self.seen)}
        return tuple(
            ALL if size == 1 else slices.get(name, ALL) for name, size in zip(dimensions, tensor.shape, strict=False)
        )


@dataclass(frozen=True)
class ChunkInputs:
    """The inputs of all chunks, except for values and terms: these are separate arguments, so that autograd sees them."""

    shape: tuple[int, int, int, int]
    """(B, H, Lq, Lk)."""
    size: ChunkSize
    counts: Counts
    """`KernelTerms.counts`."""
    mask: AttentionMask
    ends: tuple[int, ...] | None
    """On a processor, for a mask of keys: the index of the last visible key + 1 for each row of the batch. Later keys are cut off."""
    keep: torch.Tensor | None
    """What is left to mask."""
    dropout: float
    seed: int

    @classmethod
    def of(
        cls, terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float
    ) -> tuple[ChunkInputs, list[torch.Tensor | None], list[str]]:
        """The inputs, the tensors (values, then terms), and the dimensions of each tensor."""
        kernel_terms = KernelTerms.of(terms, value)
        # On other devices, to know the ends is to wait for the device.
        ends, keep = mask.row_ends(len(value)) if on_processor(value.device) else (None, mask.keep)
        size = ChunkSize.of(value, terms.query_length, ends is None or len(set(ends)) == 1)
        tensors = [value, *kernel_terms.tensors()]
        if size.heads == 1 and on_processor(value.device):
            # Projections lay out heads as (B, L, H, d). The chunks of a head would each copy its keys and values.
            tensors[:3] = [None if tensor is None else tensor.contiguous() for tensor in tensors[:3]]
        inputs = cls(
            shape=(*value.shape[:2], terms.query_length, value.shape[-2]),
            size=size,
            counts=kernel_terms.counts,
            mask=AttentionMask(mask.keep, None, mask.causal_offset),
            ends=ends,
            keep=keep,
            dropout=dropout,
            seed=draw_seed(dropout, value),
        )
        return inputs, tensors, ["bhk.", *kernel_terms.dimensions()]

    def generator(self, device: torch.device) -> torch.Generator | None:
        return generator_from(self.seed, device)

    def chunks(self) -> Iterator[Chunk]:
        """All chunks that see a key, ordered by rows of the batch, heads and queries."""
        batch, heads, query_length, key_length = self.shape
        for rows in slices(batch, self.size.rows):
            end = key_length if self.ends is None else self.ends[rows.start]
            for head in slices(heads, self.size.heads) if end else ():
                for queries in slices(query_length, self.size.queries):
                    seen = end
                    if isinstance(self.mask.causal_offset, int):
                        seen = max(1, min(end, queries.stop + self.mask.causal_offset))
                    yield Chunk(rows, head, queries, seen)

    def writes_once(self, tensor: torch.Tensor, dimensions: str) -> bool:
        """Whether each number of a tensor belongs to one chunk only."""
        return all(
            size >= whole or (name in dimensions and tensor.shape[dimensions.index(name)] > 1)
            for name, size, whole in zip("bhq", self.size, self.shape, strict=False)
        )

    @property
    def covers_all(self) -> bool:
        """Whether the chunks cover all logits."""
        ends_cut = self.ends is not None and min(self.ends, default=0) < self.shape[-1]
        return not (ends_cut or isinstance(self.mask.causal_offset, int))

    def weights(self, chunk: Chunk, parts: Tensors, generator: torch.Generator | None) -> torch.Tensor:
        """The weights (b, h, q, seen) of a chunk after dropout, from its parts of the tensors."""
        value = cast(torch.Tensor, parts[0])
        scores, is_new = KernelTerms.from_tensors(parts[1:], self.counts).logits(chunk.seen)
        if not on_processor(value.device):
            wide = torch.promote_types(scores.dtype, torch.float32)
            scores, is_new = scores.to(wide), is_new or scores.dtype != wide
        hidden = self.hidden(chunk, value.device)
        in_place = on_processor(value.device) and not torch.is_grad_enabled()
        if hidden is not None:
            # The dtype's minimum, not −inf: the gradient of a row of only −inf is NaN.
            least = torch.finfo(scores.dtype).min
            hide = scores.masked_fill_ if in_place and is_new and can_hold(scores, hidden) else scores.masked_fill
            scores, is_new = hide(hidden, least), True
        weights = torch.softmax(scores, -1, out=scores) if in_place and is_new else scores.softmax(-1)
        if hidden is not None:
            weights = (weights.masked_fill_ if in_place else weights.masked_fill)(hidden, 0.0)
        queries = chunk.queries.stop - chunk.queries.start
        weights = weights.to(value.dtype).expand(*value.shape[:2], queries, -1)
        return weights * dropout_factors(weights, self.dropout, generator) if self.dropout else weights

    def hidden(self, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
        """True where a query of a chunk does not see a key, broadcasts to (b, h, q, seen); None if all see all."""
        hidden = None if self.keep is None else ~self.keep[chunk.part_of(self.keep, "bhqk")]
        if self.mask.causal_offset is not None:
            last = torch.arange(chunk.queries.start, chunk.queries.stop, device=device) + self.mask.causal_offset
            future = torch.arange(chunk.seen, device=device) > last[:, None]
            hidden = future if hidden is None else hidden | future
        return hidden

    def dropout_factors(self, value: torch.Tensor) -> torch.Tensor | None:
        """The factor that dropout gives each weight, (B, H, Lq, Lk); None without dropout."""
        if not self.dropout:
            return None
        factors, generator = value.new_zeros(self.shape), self.generator(value.device)
        for chunk in self.chunks():
            part = factors[chunk.rows, chunk.heads, chunk.queries, : chunk.seen]
            part.copy_(dropout_factors(part, self.dropout, generator))
        return factors


def slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
