"""The tiles of the tiled route: their sizes, their inputs, their logits and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from ..device.matmul import product
from ..logits.masks import AttentionMask
from .static import accumulate_static_gradients, empty_static_gradients
from .terms import Terms, static_terms

ROWS = 512  # of a tile: with fewer, matrix products are slow; with more, a tile does not fit the cache (docs/performance.md)
TILE_LOGITS = 1 << 18  # logits of a tile that holds several heads of a short sequence


class Block(NamedTuple):
    """One row of the batch, some heads, some queries, and the number of keys up to the last that these queries see."""

    row: int
    heads: slice
    queries: slice
    seen: int


@dataclass(frozen=True)
class TileInputs:
    """The inputs of a tile. `with_tensors` adds the tensors, after autograd has seen them.

    If `keep` is a mask of keys, `ends` holds the index of the last visible key + 1 for each row of the batch: later keys are cut
    off, not masked. `holes` says for each row whether an earlier key is hidden.

    The tensors' order: value (B, H, Lk, d_v), query (B, H, Lq, r), key (1 or B, H, Lk, r), key_bias (1 or B, H or 1, 1, Lk), then
    an inner and an outer for each tiled term, an explicit (1 or B, 1 or H, 1 or Lq, Lk) each, and weight, table and keys
    of each static term.
    """

    query_length: int
    key_length: int
    tiled_terms: int
    explicit_terms: int
    keep: torch.Tensor | None
    causal_offset: int | None
    dropout: float
    seed: int
    ends: tuple[int, ...] | None = None
    holes: tuple[bool, ...] | None = None
    tensors: Sequence[torch.Tensor | None] = ()
    contiguous_heads: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float
    ) -> tuple[TileInputs, list[torch.Tensor | None]]:
        """The inputs, and their tensors in order."""
        query: torch.Tensor | None = None
        key: torch.Tensor | None = None
        if len(terms.low_rank) == 1:
            query, key = terms.low_rank[0][0].to(value.dtype), terms.low_rank[0][1].to(value.dtype)
        elif terms.low_rank:
            query, key = terms.joined_low_rank(value)
        tensors: list[torch.Tensor | None] = [value, query, key, terms.key_bias]
        for inner, outer, _ in terms.tiled:
            tensors += [inner, outer]
        tensors += terms.explicit
        for term in terms.static:
            tensors += term
        seed = int(torch.randint(1 << 62, ())) if dropout else 0
        ends, holes = _key_ends(mask, len(value))
        tile_inputs = cls(
            query_length=terms.query_length,
            key_length=value.shape[-2],
            tiled_terms=len(terms.tiled),
            explicit_terms=len(terms.explicit),
            keep=mask.keep,
            causal_offset=mask.causal_offset,  # type: ignore[arg-type]
            dropout=dropout,
            seed=seed,
            ends=ends,
            holes=holes,
        )
        return tile_inputs, tensors

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> TileInputs:
        return replace(self, tensors=tensors, contiguous_heads={})

    def without_tensors(self) -> TileInputs:
        return replace(self, tensors=(), contiguous_heads={})

    @property
    def value(self) -> torch.Tensor:
        return self.tensors[0]  # type: ignore[return-value]

    @property
    def first_explicit(self) -> int:
        return 4 + 2 * self.tiled_terms

    @property
    def first_static(self) -> int:
        return self.first_explicit + self.explicit_terms

    def generator(self) -> torch.Generator | None:
        """A generator that draws the same dropout in the forward and the backward."""
        return torch.Generator().manual_seed(self.seed) if self.dropout else None

    def blocks(self) -> Iterator[Block]:
        """Several heads of a short sequence at a time, or `ROWS` queries of one head of a long one."""
        batch, heads = self.value.shape[:2]
        heads_together = max(1, min(heads, TILE_LOGITS // (self.query_length * self.key_length)))
        if heads_together < 4:
            heads_together = 1  # one head at a time takes the faster matrix product
        rows = self.query_length if heads_together > 1 else ROWS
        for row in range(batch):
            key_length = self.key_length if self.ends is None else self.ends[row]
            if key_length == 0:
                continue
            for head in range(0, heads, heads_together):
                for start in range(0, self.query_length, rows):
                    stop = min(start + rows, self.query_length)
                    seen = key_length
                    if self.causal_offset is not None:
                        seen = min(seen, stop + self.causal_offset)
                    yield Block(row, slice(head, min(head + heads_together, heads)), slice(start, stop), seen)

    def head_rows(self, number: int, block: Block) -> torch.Tensor:
        """The keys or values (B, H, Lk, r) of a block's row and heads: (g, Lk, r), contiguous for one head.

        Projections lay out tensors as (B, Lk, H, r), which a product of one matrix does not support. The tiles of a head are
        consecutive, so the copy of one head is cached.
        """
        tensor = cast(torch.Tensor, self.tensors[number])
        row = block.row if len(tensor) > 1 else 0
        if block.heads.stop - block.heads.start > 1:
            return tensor[row, block.heads]
        head = (row, block.heads.start)
        if number not in self.contiguous_heads or self.contiguous_heads[number][0] != head:
            self.contiguous_heads[number] = head, tensor[row, block.heads].contiguous()
        return self.contiguous_heads[number][1]

    def weights(self, block: Block) -> torch.Tensor:
        """softmax(logits + mask) of one tile, in the values' dtype: (g, rows, seen). A query without a visible key has zeros."""
        scores = self.logits(block)
        hidden = self.hidden(block, scores.device)
        if hidden is None:
            return torch.softmax(scores, -1, out=scores).to(self.value.dtype)
        scores = scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1, out=scores).masked_fill_(hidden, 0.0).to(self.value.dtype)

    def hidden(self, block: Block, device: torch.device) -> torch.Tensor | None:
        """True where a query of a tile does not see a key, broadcasts to (g, rows, seen); None if all see all."""
        hidden: torch.Tensor | None = None
        if self.keep is not None and (self.holes is None or self.holes[block.row]):
            hidden = ~_block_part(self.keep, block)
        if self.causal_offset is not None:
            rows = torch.arange(block.queries.start, block.queries.stop, device=device)[:, None]
            future = torch.arange(block.seen, device=device) > rows + self.causal_offset
            hidden = future if hidden is None else hidden | future
        return hidden

    def logits(self, block: Block) -> torch.Tensor:
        """One tile of logits, in its own memory: (g, rows, seen)."""
        query, _, key_bias = self.tensors[1:4]
        total: torch.Tensor | None = None
        if query is not None:
            total = product(
                query[block.row, block.heads, block.queries],
                self.head_rows(2, block)[:, : block.seen].transpose(-1, -2),
            )
        for number in range(4, self.first_explicit, 2):
            inner, outer = self.factors(number, block)
            tile = (outer.unsqueeze(-1) * inner.unsqueeze(-2)).flatten(-2)[..., : block.seen]
            total = tile if total is None else total.add_(tile)
        for term in static_terms(self.tensors[self.first_static :]):
            tile = term.tile(block.heads, block.queries, block.seen)
            if term.weight is None:
                total = self._add_tile(total, tile, block, fresh=term.keys is not None)
            elif total is None:
                total = tile * term.weight[block.heads, None, None].to(tile.dtype)
            else:
                total = total.addcmul_(tile, term.weight[block.heads, None, None].to(tile.dtype))
        for explicit in self.tensors[self.first_explicit : self.first_static]:
            total = self._add_tile(total, _block_part(explicit, block), block)  # type: ignore[arg-type]
        if key_bias is not None:
            total = self._add_tile(total, _block_part(key_bias, block), block)
        return total  # type: ignore[return-value]

    def _add_tile(
        self, total: torch.Tensor | None, tile: torch.Tensor, block: Block, fresh: bool = False
    ) -> torch.Tensor:
        if total is not None:
            return total.add_(tile)
        shape = (block.heads.stop - block.heads.start, block.queries.stop - block.queries.start, block.seen)
        if tile.shape != shape:
            return tile.expand(shape).contiguous()
        return tile if fresh else tile.clone()

    def factors(self, number: int, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Inner (g, rows, a) and the columns of outer (g, rows, b) that the visible keys need."""
        inner, outer = (
            cast(torch.Tensor, factor)[block.row, block.heads, block.queries]
            for factor in self.tensors[number : number + 2]
        )
        return inner, outer[..., : -(-block.seen // inner.shape[-1])]

    def dropout_mask(self, weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor | None:
        """0 for dropped weights, 1/(1 − p) for the others; None without dropout."""
        if generator is None:
            return None
        return torch.empty_like(weights).bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)

    @property
    def covers_all_logits(self) -> bool:
        """Whether the tiles of each row of the batch cover all its logits."""
        return self.causal_offset is None and (self.ends is None or min(self.ends) == self.key_length)

    def empty_gradients(self, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """A tensor for each gradient that is needed, laid out as the input: uninitialised if it is overwritten, else zeros."""
        grads: list[torch.Tensor | None] = []
        for number, tensor in enumerate(self.tensors[: self.first_static]):
            make = torch.empty_like if self.covers_all_logits and number < 3 else torch.zeros_like
            grads.append(make(tensor) if needed[number] and tensor is not None else None)
        static = static_terms(self.tensors[self.first_static :])
        return grads + empty_static_gradients(static, needed[self.first_static :], self.covers_all_logits)

    def add_key_gradient(self, grad: torch.Tensor, block: Block, tile: torch.Tensor) -> None:
        """Add a tile (g, seen, r) to the gradient of the keys or values that a block sees."""
        row = block.row if len(grad) > 1 else 0
        target = grad[row, block.heads, : block.seen]
        if self.covers_all_logits and block.queries.start == 0 and row == block.row:
            target.copy_(tile)
        else:
            target += tile

    def accumulate_gradients(self, block: Block, logit_grad: torch.Tensor, grads: list[Any]) -> None:
        """Add the contribution of a tile's gradient (g, rows, seen) to the gradient of each input."""
        query, key = self.tensors[1:3]
        if query is not None and key is not None:
            if grads[1] is not None:
                grads[1][block.row, block.heads, block.queries] = product(
                    logit_grad, self.head_rows(2, block)[:, : block.seen]
                )
            if grads[2] is not None:
                rows = query[block.row, block.heads, block.queries].transpose(-1, -2).contiguous()
                self.add_key_gradient(grads[2], block, product(rows, logit_grad).transpose(-1, -2))
        if grads[3] is not None:
            _add_summed(grads[3], block, logit_grad)
        for number in range(4, self.first_explicit, 2):
            self._accumulate_tiled_gradients(number, block, logit_grad, grads)
        for number in range(self.first_explicit, self.first_static):
            if grads[number] is not None:
                _add_summed(grads[number], block, logit_grad)
        static = static_terms(self.tensors[self.first_static :])
        if any(grad is not None for grad in grads[self.first_static :]):
            first = self.covers_all_logits and block.row == 0
            accumulate_static_gradients(
                grads[self.first_static :], static, logit_grad, block.heads, block.queries, first
            )

    def _accumulate_tiled_gradients(
        self, number: int, block: Block, logit_grad: torch.Tensor, grads: list[Any]
    ) -> None:
        inner, outer = (factor.to(logit_grad.dtype) for factor in self.factors(number, block))
        width, count = inner.shape[-1], outer.shape[-1]
        if width * count > block.seen:
            logit_grad = torch.nn.functional.pad(logit_grad, (0, width * count - block.seen))
        grid = logit_grad.unflatten(-1, (count, width))  # (g, rows, b, a)
        if grads[number] is not None:
            grads[number][block.row, block.heads, block.queries] = (outer.unsqueeze(-2) @ grid).squeeze(-2)
        if grads[number + 1] is not None:
            grads[number + 1][block.row, block.heads, block.queries, :count] = (grid @ inner.unsqueeze(-1)).squeeze(-1)


def _key_ends(mask: AttentionMask, batch: int) -> tuple[tuple[int, ...] | None, tuple[bool, ...] | None]:
    """(`ends`, `holes`) of a mask of keys (B or 1, 1, 1, Lk); (None, None) for any other."""
    if mask.keep is None or mask.keep.shape[1] != 1 or mask.keep.shape[2] != 1:
        return None, None
    extents = mask.extents()
    ends = tuple(extents.of(row)[1] for row in range(batch))
    return ends, tuple(extents.hides_one(row) for row in range(batch))


def _block_part(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """A block's part of a tensor that broadcasts to (B, H, Lq, Lk): (1 or g, 1 or rows, seen)."""
    row = block.row if len(tensor) > 1 else 0
    heads = block.heads if tensor.shape[1] > 1 else slice(0, 1)
    queries = block.queries if tensor.shape[2] > 1 else slice(0, 1)
    return tensor[row, heads, queries, : block.seen]


def _add_summed(grad: torch.Tensor, block: Block, logit_grad: torch.Tensor) -> None:
    head_rows = _block_part(grad, block)
    for dim in (0, 1):
        if head_rows.shape[dim] == 1 and logit_grad.shape[dim] > 1:
            logit_grad = logit_grad.sum(dim, keepdim=True)
    head_rows += logit_grad
