"""Attention to the keys in hash buckets. Queries are sorted by bucket, so that one product compares them with its keys.

With T hashes and buckets of k keys, a query has T·k candidate columns of logits. A key that occurs twice counts once.
The k largest candidates are kept. Their softmax is multiplied with the values, again bucket by bucket. The work runs on
some heads at a time, and the backward recomputes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...choices import Buckets
from ...choices.all_pairs import hiding_bias
from ...choices.hashing import Assignment
from ..sdpa import kernel_attention
from .rows import Rows

TILE = 32  # queries of one bucket in one product
QUERY_HASHES = 1 << 14  # queries times hashes that are computed at a time
SHORT_LENGTH = 768  # tokens; up to this length, comparing all pairs is faster
COMPARED_VALUES = 1 << 19  # keys times directions that are compared at a time, if all pairs are compared


def bucket_attention(choice: Buckets, rows: Rows) -> torch.Tensor:
    """The `bucket_size` best keys by hashing. (b, H, n, d_v)."""
    if rows.holes is not None:
        return torch.cat([_packed_row_attention(choice, rows, number) for number in range(len(rows.value))])
    batch, heads, length, width = rows.value.shape
    if length <= choice.bucket_size:
        return _full_attention(rows)
    if length <= SHORT_LENGTH:
        return _all_pairs_attention(choice, rows)
    outputs = [_part_attention(choice, part) for part in parts_of(rows, len(choice.directions))]
    return torch.cat(outputs, dim=1).unflatten(1, (batch, heads)).permute(1, 2, 0, 3)  # from (n, b·H, d_v)


@dataclass(frozen=True)
class BucketInputs:
    """Heads of one or more rows, flattened to g: query and key (g, n, r), value (g, n, d_v), bias (g, 1 or n, n)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    dropout: float


def parts_of(rows: Rows, hashes: int) -> Iterator[BucketInputs]:
    """All rows at once if they are short, else some heads of one row at a time."""
    batch, heads, length, _ = rows.value.shape
    heads_together = max(1, QUERY_HASHES // (length * hashes))
    bias = None if rows.bias is None else rows.bias.expand(batch, heads, -1, -1)
    rows_together = batch if heads_together >= batch * heads else 1
    for row in range(0, batch, rows_together):
        for head in range(0, heads, heads if rows_together > 1 else heads_together):
            part_slice = (
                slice(row, row + rows_together),
                slice(head, head + (heads if rows_together > 1 else heads_together)),
            )
            query, key, value = (x[part_slice].flatten(0, 1) for x in (rows.query, rows.key, rows.value))
            yield BucketInputs(
                query, key, value, None if bias is None else bias[part_slice].flatten(0, 1), rows.scaling, rows.dropout
            )


def _part_attention(choice: Buckets, part: BucketInputs) -> torch.Tensor:
    """Assign queries to buckets and attend, with checkpointing in training: (n, g, d_v)."""
    assignment = choice.assign(part.query, part.key)
    tensors = (part.query, part.key, part.value, part.bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        output = checkpoint(_candidate_attention, choice.bucket_size, assignment, part, *tensors, use_reentrant=False)
    else:
        output = _candidate_attention(choice.bucket_size, assignment, part, *tensors)
    return output.transpose(0, 1)


def _candidate_attention(
    size: int,
    assignment: Assignment,
    part: BucketInputs,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention to the candidates: (g, n, d_v)."""
    heads, length, width = value.shape
    tiles = Tiles.of(assignment)
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys = key.reshape(-1, key.shape[-1])[tiles.members].to(dtype)  # (t, k, r)
    queries = query.reshape(-1, query.shape[-1])[tiles.queries].to(dtype)  # (t, TILE, r)
    logits = (queries @ keys.transpose(-1, -2)).flatten(0, 1)[tiles.indices]  # (g, T, n, k)
    logits = logits.transpose(1, 2).flatten(2)  # (g, n, T·k)
    columns = candidate_keys(assignment)
    kept = best_candidates(logits.detach(), columns, assignment, size)
    logits = logits * part.scaling
    if bias is not None:
        logits = logits + _gather_bias(bias, columns)
    logits = logits.masked_fill(~kept, torch.finfo(logits.dtype).min)
    weights = functional.dropout(logits.softmax(-1).masked_fill(~kept, 0.0).to(value.dtype), part.dropout)
    weights = weights.unflatten(-1, (-1, columns.shape[-1] // assignment.bucket.shape[-2])).transpose(
        1, 2
    )  # (g, T, n, k)
    sorted_weights = weights.flatten(0, 2)[tiles.entries]  # (t, TILE, k)
    mixed = sorted_weights @ value.reshape(-1, width)[tiles.members]  # (t, TILE, d_v)
    return mixed.flatten(0, 1)[tiles.indices].sum(1)  # (g, n, d_v)


@dataclass(frozen=True)
class Tiles:
    """Queries sorted by bucket, `TILE` of them at a time.

    Attributes:
        members: the keys of each tile's bucket (t, k), as indices into all g·n tokens.
        queries: the queries of each tile (t, TILE), as indices into all g·n tokens; unused entries hold any index.
        entries: the same as indices into all g·T·n entries (head, hash, query).
        indices: the entry (of t·TILE) of each head, hash and query: (g, T, n).
    """

    members: torch.Tensor
    queries: torch.Tensor
    entries: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, assignment: Assignment) -> Tiles:
        heads, hashes, length = assignment.bucket.shape
        count = assignment.members.shape[-2]
        device = assignment.bucket.device
        first = torch.arange(heads * hashes, device=device).view(heads, hashes, 1) * count
        bucket, order = (
            (assignment.bucket + first).flatten().sort()
        )  # bucket numbers that are unique over heads and hashes
        sizes = torch.bincount(bucket, minlength=heads * hashes * count)
        used = (sizes + TILE - 1) // TILE  # tiles of each bucket
        starts = TILE * (used.cumsum(0) - used) - (sizes.cumsum(0) - sizes)
        entry = torch.arange(len(bucket), device=device) + starts[bucket]
        total = int(used.sum())
        entries = torch.zeros(total * TILE, dtype=torch.long, device=device)
        entries[entry] = order
        indices = torch.empty_like(order)
        indices[order] = entry
        owner = torch.repeat_interleave(used)  # the bucket of each tile
        members = assignment.members.flatten(0, 2)[owner] + (owner // (hashes * count) * length).unsqueeze(-1)
        queries = entries // (hashes * length) * length + entries % length
        return cls(members, queries.view(total, TILE), entries.view(total, TILE), indices.view(heads, hashes, length))


def candidate_keys(assignment: Assignment) -> torch.Tensor:
    """The candidate keys of each query, hash by hash: (g, n, T·k)."""
    size = assignment.members.shape[-1]
    keys = assignment.members.gather(-2, assignment.bucket.unsqueeze(-1).expand(*assignment.bucket.shape, size))
    return keys.transpose(1, 2).flatten(2)


def best_candidates(logits: torch.Tensor, columns: torch.Tensor, assignment: Assignment, size: int) -> torch.Tensor:
    """True for the `size` largest candidates (g, n, T·k), each key counted once."""
    hashes = assignment.bucket.shape[-2]
    if hashes == 1:
        return torch.ones_like(columns, dtype=torch.bool)
    repeated = _repeated_candidates(columns, assignment)
    logits = logits.masked_fill(repeated, float("-inf"))
    kept = torch.zeros_like(repeated).scatter_(-1, logits.topk(size, dim=-1).indices, True)
    return kept & ~repeated


def _repeated_candidates(columns: torch.Tensor, assignment: Assignment) -> torch.Tensor:
    """True for candidates that an earlier hash has already found: (g, n, T·k)."""
    heads, hashes, buckets, size = assignment.members.shape
    length = assignment.bucket.shape[-1]
    holds = torch.zeros(heads, hashes, buckets, length, dtype=torch.bool, device=columns.device)
    holds.scatter_(-1, assignment.members, True)
    repeated = torch.zeros_like(columns, dtype=torch.bool).view(heads, length, hashes, size)
    head = torch.arange(heads, device=columns.device).view(-1, 1, 1, 1)
    keys = columns.view(heads, length, hashes, size)
    for earlier in range(hashes - 1):
        bucket = assignment.bucket[:, earlier, :, None, None]
        repeated[:, :, earlier + 1 :] |= holds[head, earlier, bucket, keys[:, :, earlier + 1 :]]
    return repeated.flatten(2)


def _all_pairs_attention(choice: Buckets, rows: Rows) -> torch.Tensor:
    """Compute the logits of all pairs and hide those that are not chosen. The heads in one pass fit the cache."""
    batch, heads, length, width = rows.value.shape
    heads_together = max(1, COMPARED_VALUES // (2 * choice.directions[..., 0].numel() * length))
    queries, keys, values = (x.flatten(0, 1) for x in (rows.query, rows.key, rows.value))  # (B·H, n, …)
    bias = None if rows.bias is None else rows.bias.expand(batch, heads, -1, -1).flatten(0, 1)
    outputs = []
    for start in range(0, batch * heads, heads_together):
        part_slice = slice(start, start + heads_together)
        query, key, value = queries[part_slice], keys[part_slice], values[part_slice]  # (g, n, …)
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2)  # (g, n, n)
        logits = scores * rows.scaling + hiding_bias(choice.chosen_pairs(query, key, scores.detach()), dtype)
        if bias is not None:
            logits = logits + bias[part_slice]
        outputs.append(functional.dropout(logits.softmax(-1).to(value.dtype), rows.dropout) @ value)
    return torch.cat(outputs).view(batch, heads, length, width)


def _full_attention(rows: Rows) -> torch.Tensor:
    """Full attention, for rows with at most as many tokens as a bucket."""
    bias = None if rows.bias is None else rows.bias.to(rows.query.dtype)
    return kernel_attention(rows.query, rows.key, rows.value, bias, rows.dropout, scale=rows.scaling)


def _packed_row_attention(choice: Buckets, rows: Rows, number: int) -> torch.Tensor:
    """Attention of one row with its padding removed. Hashing knows no positions, so the result is the same."""
    row, tokens = rows.of_row(number)
    return torch.zeros_like(rows.value[number, None]).index_copy(-2, tokens, bucket_attention(choice, row))


def _gather_bias(bias: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return bias.expand(-1, columns.shape[1], -1).gather(-1, columns)
