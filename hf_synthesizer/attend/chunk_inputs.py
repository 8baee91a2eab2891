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
    """Rows of the batch, heads, queries, and the keys that these queries see.

    The keys are one span, or two if a window hides those between.
    """

    rows: slice
    heads: slice
    queries: slice
    keys: tuple[slice, ...]

    @property
    def key_length(self) -> int:
        return sum(span.stop - span.start for span in self.keys)

    def parts_of(self, tensor: torch.Tensor, dimensions: str) -> list[tuple[slice, ...]]:
        """The indices of this chunk's parts of a tensor (`KernelTerms.dimensions`). A size of 1 serves all."""
        by_name = {"b": self.rows, "h": self.heads, "q": self.queries}
        index = [
            ALL if size == 1 else by_name.get(name, ALL) for name, size in zip(dimensions, tensor.shape, strict=False)
        ]
        place = dimensions.find("k")
        if place < 0 or place >= tensor.dim() or tensor.shape[place] == 1:
            return [tuple(index)]
        return [(*index[:place], span, *index[place + 1 :]) for span in self.keys]

    def part_of(self, tensor: torch.Tensor, dimensions: str) -> torch.Tensor:
        """This chunk's part of a tensor; a view if the keys are one span."""
        parts = [tensor[index] for index in self.parts_of(tensor, dimensions)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dimensions.index("k"))

    def pieces(
        self, part: torch.Tensor, tensor: torch.Tensor, dimensions: str
    ) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
        """The inverse of `part_of`: the index in the tensor and the numbers of each piece."""
        indices = self.parts_of(tensor, dimensions)
        if len(indices) == 1:
            return [(indices[0], part)]
        lengths = [span.stop - span.start for span in self.keys]
        return list(zip(indices, part.split(lengths, dim=dimensions.index("k")), strict=True))

    def key_indices(self, device: torch.device) -> torch.Tensor:
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.keys])


@dataclass(frozen=True)
class ChunkInputs:
    """The inputs of all chunks. Values and terms are separate arguments, so that autograd sees them."""

    shape: tuple[int, int, int, int]
    """(B, H, Lq, Lk)."""
    size: ChunkSize
    counts: Counts
    """`KernelTerms.counts`."""
    mask: AttentionMask
    ends: tuple[int, ...] | None
    """The index of each row's last visible key + 1, on a processor under a mask of keys. Later keys are cut off."""
    keep: torch.Tensor | None
    """What is left to mask."""
    sinks: tuple[int, int]
    """With a window, the keys that are among the first tokens of some row."""
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
            mask=AttentionMask(mask.keep, None, mask.causal_offset, reach=mask.reach),
            sinks=sink_span(mask),
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
                    yield Chunk(rows, head, queries, self.keys_of(queries, seen))

    def keys_of(self, queries: slice, seen: int) -> tuple[slice, ...]:
        """The keys before `seen` that some of these queries see."""
        reach = self.mask.reach
        if reach is None:
            return (slice(0, seen),)
        start = cast(int, reach.positions.start)
        near = slice(
            max(0, start + queries.start - reach.window + 1), min(seen, start + queries.stop - 1 + reach.window)
        )
        sinks = slice(self.sinks[0], min(seen, self.sinks[1]))
        if sinks.stop <= sinks.start:
            return (near,)
        if sinks.stop >= near.start:
            return (slice(min(sinks.start, near.start), max(sinks.stop, near.stop)),)
        return (sinks, near)

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
        return not (ends_cut or isinstance(self.mask.causal_offset, int) or self.mask.reach is not None)

    def weights(self, chunk: Chunk, parts: Tensors, generator: torch.Generator | None) -> torch.Tensor:
        """The weights (b, h, q, k) of a chunk after dropout, from its parts of the tensors."""
        value = cast(torch.Tensor, parts[0])
        terms = KernelTerms.from_tensors(parts[1:], self.counts)
        distances = self.distances(chunk, value.device) if terms.has_distances else None
        scores, is_new = terms.logits(chunk.key_length, distances)
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

    def distances(self, chunk: Chunk, device: torch.device) -> torch.Tensor:
        """j − i for the keys j and the queries i of a chunk, (q, k)."""
        query = torch.arange(chunk.queries.start, chunk.queries.stop, device=device) + self.counts.start
        return chunk.key_indices(device) - query[:, None]

    def hidden(self, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
        """True where a query of a chunk does not see a key, broadcasts to (b, h, q, k); None if all see all."""
        hidden = None if self.keep is None else ~chunk.part_of(self.keep, "bhqk")
        reach = self.mask.reach
        if self.mask.causal_offset is None and reach is None:
            return hidden
        key = chunk.key_indices(device)
        query = torch.arange(chunk.queries.start, chunk.queries.stop, device=device)[:, None]
        if self.mask.causal_offset is not None:
            future = key > query + self.mask.causal_offset
            hidden = future if hidden is None else hidden | future
        if reach is not None:
            tokens = chunk.part_of(reach.tokens, "bk")
            first = (tokens >= 0) & (tokens < reach.sinks)  # (B or 1, k)
            far = (key - query - reach.positions.start).abs() >= reach.window
            far = (far & ~first[:, None, :]).unsqueeze(1)
            hidden = far if hidden is None else hidden | far
        return hidden

    def dropout_factors(self, value: torch.Tensor) -> torch.Tensor | None:
        """The factor that dropout gives each weight, (B, H, Lq, Lk); None without dropout."""
        if not self.dropout:
            return None
        factors, generator = value.new_zeros(self.shape), self.generator(value.device)
        for chunk in self.chunks():
            part = chunk.part_of(factors, "bhqk")
            drawn = dropout_factors(part, self.dropout, generator)
            for index, piece in chunk.pieces(drawn, factors, "bhqk"):
                factors[index] = piece
        return factors


def sink_span(mask: AttentionMask) -> tuple[int, int]:
    """The keys that are among the first tokens of some row, for a mask with a window; the mask is read once."""
    if mask.reach is None or not mask.reach.sinks:
        return 0, 0
    first = (0,) if mask.keep is None else mask.extents().first
    return min(first), max(first) + mask.reach.sinks


def slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
