"""Buckets, as dense problems that sorting makes: all queries that look into a bucket meet its keys in one product.

What a query finds with T hashes of buckets of k keys are T·k columns of logits. A key that is found twice counts once, the k
largest are kept, and the softmax over them meets the values bucket by bucket again. Some heads at a time; the backward
makes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..choices import Buckets
from ..choices.hashing import Found
from ..choices.pairs import hiding

if TYPE_CHECKING:
    from .sparse import Rows

TILE = 32  # queries of one bucket that go together
ENTRIES = 1 << 14  # of queries and hashes that are worked on at a time
SHORT = 768  # tokens; up to so many it is faster to look at all pairs
VALUES = 1 << 19  # of keys and directions that are compared at a time, where all pairs are looked at


def attend(choice: Buckets, rows: Rows) -> torch.Tensor:
    """The `bucket_size` best keys by hashing. (b, H, n, d_v)."""
    if rows.holes is not None:
        return torch.cat([_without_holes(choice, rows, number) for number in range(len(rows.value))])
    batch, heads, length, width = rows.value.shape
    if length <= choice.bucket_size:
        return _all(rows)
    if length <= SHORT:
        return _short(choice, rows)
    made = [_some(choice, part) for part in parts_of(rows, len(choice.directions))]
    return torch.cat(made, dim=1).unflatten(1, (batch, heads)).permute(1, 2, 0, 3)  # made as (n, b·H, d_v)


@dataclass(frozen=True)
class Part:
    """Some heads of some rows, one after the other: query and key (g, n, r), value (g, n, d_v), bias (g, 1 or n, n)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    dropout: float


def parts_of(rows: Rows, hashes: int) -> Iterator[Part]:
    """All rows at once if they are short; else some heads of one row at a time."""
    batch, heads, length, _ = rows.value.shape
    together = max(1, ENTRIES // (length * hashes))
    bias = None if rows.bias is None else rows.bias.expand(batch, heads, -1, -1)
    every = batch if together >= batch * heads else 1
    for row in range(0, batch, every):
        for head in range(0, heads, heads if every > 1 else together):
            own = slice(row, row + every), slice(head, head + (heads if every > 1 else together))
            query, key, value = (x[own].flatten(0, 1) for x in (rows.query, rows.key, rows.value))
            yield Part(
                query, key, value, None if bias is None else bias[own].flatten(0, 1), rows.scaling, rows.dropout
            )


def _some(choice: Buckets, part: Part) -> torch.Tensor:
    """(n, g, d_v)."""
    found = choice.find(part.query, part.key)
    tensors = (part.query, part.key, part.value, part.bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        made = checkpoint(_meet, choice.bucket_size, found, part, *tensors, use_reentrant=False)
    else:
        made = _meet(choice.bucket_size, found, part, *tensors)
    return made.transpose(0, 1)


def _meet(
    size: int,
    found: Found,
    part: Part,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(g, n, d_v) for the tensors of a part."""
    heads, length, width = value.shape
    tiles = Tiles.of(found)
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.reshape(-1, key.shape[-1])[tiles.members].to(wide)  # (t, k, r)
    asked = query.reshape(-1, query.shape[-1])[tiles.queries].to(wide)  # (t, TILE, r)
    logits = (asked @ keys.transpose(-1, -2)).flatten(0, 1)[tiles.indices]  # (g, T, n, k)
    logits = logits.transpose(1, 2).flatten(2)  # (g, n, T·k)
    columns = columns_of(found)
    kept = best(logits.detach(), columns, found, size)
    logits = logits * part.scaling
    if bias is not None:
        logits = logits + _picked(bias, columns)
    logits = logits.masked_fill(~kept, torch.finfo(logits.dtype).min)
    weights = functional.dropout(logits.softmax(-1).masked_fill(~kept, 0.0).to(value.dtype), part.dropout)
    weights = weights.unflatten(-1, (-1, columns.shape[-1] // found.bucket.shape[-2])).transpose(1, 2)  # (g, T, n, k)
    sorted_weights = weights.flatten(0, 2)[tiles.entries]  # (t, TILE, k)
    mixed = sorted_weights @ value.reshape(-1, width)[tiles.members]  # (t, TILE, d_v)
    return mixed.flatten(0, 1)[tiles.indices].sum(1)  # (g, n, d_v)


@dataclass(frozen=True)
class Tiles:
    """Queries sorted by bucket, `TILE` of them at a time.

    Attributes:
        members: for each tile the keys of its bucket (t, k), as numbers among all g·n tokens.
        queries: for each tile its queries (t, TILE), as numbers among all g·n tokens; a place that is free has any.
        entries: the same, as numbers among all g·T·n entries.
        indices: where the entry of a head, hash and query is among the t·TILE places: (g, T, n).
    """

    members: torch.Tensor
    queries: torch.Tensor
    entries: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, found: Found) -> Tiles:
        heads, hashes, length = found.bucket.shape
        count = found.members.shape[-2]
        device = found.bucket.device
        first = torch.arange(heads * hashes, device=device).view(heads, hashes, 1) * count
        bucket, order = (found.bucket + first).flatten().sort()  # of all entries, whatever head and hash
        sizes = torch.bincount(bucket, minlength=heads * hashes * count)
        used = (sizes + TILE - 1) // TILE  # tiles a bucket
        starts = TILE * (used.cumsum(0) - used) - (sizes.cumsum(0) - sizes)
        place = torch.arange(len(bucket), device=device) + starts[bucket]
        total = int(used.sum())
        entries = torch.zeros(total * TILE, dtype=torch.long, device=device)
        entries[place] = order
        indices = torch.empty_like(order)
        indices[order] = place
        owner = torch.repeat_interleave(used)  # the bucket of each tile
        members = found.members.flatten(0, 2)[owner] + (owner // (hashes * count) * length).unsqueeze(-1)
        queries = entries // (hashes * length) * length + entries % length
        return cls(members, queries.view(total, TILE), entries.view(total, TILE), indices.view(heads, hashes, length))


def columns_of(found: Found) -> torch.Tensor:
    """The keys that each query finds, hash by hash: (g, n, T·k)."""
    size = found.members.shape[-1]
    keys = found.members.gather(-2, found.bucket.unsqueeze(-1).expand(*found.bucket.shape, size))
    return keys.transpose(1, 2).flatten(2)


def best(logits: torch.Tensor, columns: torch.Tensor, found: Found, size: int) -> torch.Tensor:
    """Which of the columns (g, n, T·k) are among the `size` largest, each key counted once."""
    hashes = found.bucket.shape[-2]
    if hashes == 1:
        return torch.ones_like(columns, dtype=torch.bool)
    again = _found_before(columns, found)
    logits = logits.masked_fill(again, float("-inf"))
    kept = torch.zeros_like(again).scatter_(-1, logits.topk(size, dim=-1).indices, True)
    return kept & ~again


def _found_before(columns: torch.Tensor, found: Found) -> torch.Tensor:
    """Which columns hold a key that an earlier hash has found as well: (g, n, T·k)."""
    heads, hashes, buckets, size = found.members.shape
    length = found.bucket.shape[-1]
    holds = torch.zeros(heads, hashes, buckets, length, dtype=torch.bool, device=columns.device)
    holds.scatter_(-1, found.members, True)
    again = torch.zeros_like(columns, dtype=torch.bool).view(heads, length, hashes, size)
    head = torch.arange(heads, device=columns.device).view(-1, 1, 1, 1)
    keys = columns.view(heads, length, hashes, size)
    for earlier in range(hashes - 1):
        bucket = found.bucket[:, earlier, :, None, None]
        again[:, :, earlier + 1 :] |= holds[head, earlier, bucket, keys[:, :, earlier + 1 :]]
    return again.flatten(2)


def _short(choice: Buckets, rows: Rows) -> torch.Tensor:
    """All pairs are made, and those that do not meet are hidden; as many heads of as many rows at a time as fit the cache."""
    batch, heads, length, width = rows.value.shape
    together = max(1, VALUES // (2 * choice.directions[..., 0].numel() * length))
    queries, keys, values = (x.flatten(0, 1) for x in (rows.query, rows.key, rows.value))  # (B·H, n, …)
    bias = None if rows.bias is None else rows.bias.expand(batch, heads, -1, -1).flatten(0, 1)
    made = []
    for start in range(0, batch * heads, together):
        own = slice(start, start + together)
        query, key, value = queries[own], keys[own], values[own]  # (g, n, …)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ key.to(wide).transpose(-1, -2)  # (g, n, n)
        logits = scores * rows.scaling + hiding(choice.pairs(query, key, scores.detach()), wide)
        if bias is not None:
            logits = logits + bias[own]
        made.append(functional.dropout(logits.softmax(-1).to(value.dtype), rows.dropout) @ value)
    return torch.cat(made).view(batch, heads, length, width)


def _all(rows: Rows) -> torch.Tensor:
    """Full attention, where no row has more tokens than a bucket."""
    padding = rows.query.shape[-1] - rows.value.shape[-1]
    query, key = (functional.pad(x, (0, max(0, -padding))) for x in (rows.query, rows.key))
    made = functional.scaled_dot_product_attention(
        query,
        key,
        functional.pad(rows.value, (0, max(0, padding))),
        attn_mask=None if rows.bias is None else rows.bias.to(query.dtype),
        dropout_p=rows.dropout,
        scale=rows.scaling,
    )
    return made[..., : rows.value.shape[-1]]


def _without_holes(choice: Buckets, rows: Rows, number: int) -> torch.Tensor:
    """One row whose tokens are moved together: hashing does not look at positions."""
    from .sparse import Rows

    tokens = rows.holes[number].nonzero().squeeze(-1)  # type: ignore[index]
    bias = rows.bias
    if bias is not None:
        bias = bias[number if len(bias) > 1 else 0, None][..., tokens]
        bias = bias if bias.shape[-2] == 1 else bias[..., tokens, :]
    query, key, value = (x[number, None, :, tokens] for x in (rows.query, rows.key, rows.value))
    made = attend(choice, Rows(query, key, value, bias, None, rows.scaling, rows.dropout, rows.causal))
    return torch.zeros_like(rows.value[number, None]).index_copy(-2, tokens, made)


def _picked(bias: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return bias.expand(-1, columns.shape[1], -1).gather(-1, columns)
