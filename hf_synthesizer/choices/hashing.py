"""The best keys by asymmetric hashing.

Hashes find near neighbours, but the key with the largest inner product `q · k` need not be near: a long key may win. Asymmetric
transforms turn one search into the other. They map a key to P(k) and a query to Q(q), so that a larger `q · k` means a smaller
distance of P(k) and Q(q). `synthesizers/lsh.py` has the transforms.

A hash is a random frame of d' directions. Each direction a, and its opposite, has a bucket: the `bucket_size` keys with the
largest a · P(k). A query goes into the bucket whose mean is nearest to Q(q). The keys that all hashes find for a query
are its candidates. The `bucket_size` candidates with the largest `q · k` are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from ..device.autocast import without_autocast
from ..device.tracing import traced
from ..logits.choice import Choice
from ..logits.tokens import Tokens
from . import all_pairs

Transformed = tuple[torch.Tensor, torch.Tensor]
Transform = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Transformed]
"""From queries (…, Lq, d), keys (…, Lk, d) and the norm's bound M (…, 1, 1) to Q and P (…, d')."""


class Assignment(NamedTuple):
    """The keys in each bucket, and the bucket of each query.

    Attributes:
        members: the keys of each bucket (…, T, 2·d', k), for T hashes; the index `Lk` means none.
        bucket: the bucket of each query (…, T, Lq).
    """

    members: torch.Tensor
    bucket: torch.Tensor


@dataclass(frozen=True)
class Buckets(Choice):
    """The rule; `directions` is (T, d', d')."""

    transform: Transform
    directions: torch.Tensor
    bucket_size: int

    def assign(self, query: torch.Tensor, key: torch.Tensor, keep: torch.Tensor | None = None) -> Assignment:
        """Fill the buckets with keys (…, Lk, d), and find the buckets of queries (…, Lq, d). `keep` broadcasts to (…, Lk)."""
        with torch.no_grad(), without_autocast(key.device):
            transformed_query, transformed_key, values = self.transformed(
                _at_least_float32(query), _at_least_float32(key), keep
            )
            values = torch.cat((values, -values), dim=-2)  # (…, T, 2·d', Lk)
            if keep is not None:
                values = values.masked_fill(~keep[..., None, None, :], float("-inf"))
            best = _largest(values, self.bucket_size)  # (…, T, 2·d', k)
            held = best.values > float("-inf")
            means = _means(transformed_key, best.indices, held)  # (…, T, 2·d', d')
            # The larger, the smaller the distance: ‖Q − mean‖² = ‖Q‖² − 2 (Q · mean − ‖mean‖² / 2).
            nearness = (
                transformed_query.unsqueeze(-3) @ means.transpose(-1, -2) - means.square().sum(-1).unsqueeze(-2) / 2
            )
            return Assignment(best.indices.masked_fill(~held, key.shape[-2]), nearness.argmax(-1))

    def chosen(self, query: torch.Tensor, key: torch.Tensor, tokens: Tokens, causal: bool) -> torch.Tensor:
        keep = None if tokens.keep is None else tokens.keep.unsqueeze(1)  # (B, 1, Lk)
        length = key.shape[-2]
        with torch.no_grad(), without_autocast(key.device):
            query, key = _at_least_float32(query), _at_least_float32(key)
            if not traced():
                return self.chosen_pairs(query, key, query @ key.transpose(-1, -2), keep)
            members, bucket = self.assign(query, key, keep)
            size = members.shape[-1]
            candidate_keys = members.gather(-2, bucket.unsqueeze(-1).expand(*bucket.shape, size))  # (B, H, T, Lq, k)
            candidates = _is_marked(candidate_keys.transpose(-2, -3).flatten(-2), length)
            scores = (query @ key.transpose(-1, -2)).masked_fill(~candidates, float("-inf"))
            return candidates & _is_marked(_largest(scores, size).indices, length)

    def chosen_pairs(
        self, query: torch.Tensor, key: torch.Tensor, scores: torch.Tensor, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which keys (…, Lk, d) are chosen by the queries (…, Lq, d), given all their products: bool (…, Lq, Lk)."""
        with torch.no_grad(), without_autocast(key.device):
            query, key, scores = _at_least_float32(query), _at_least_float32(key), _at_least_float32(scores)
            if key.shape[-2] <= self.bucket_size:
                return torch.ones_like(scores, dtype=torch.bool)
            query, key = query.flatten(0, -3), key.flatten(0, -3)
            keep = None if keep is None else keep.expand(*scores.shape[:-2], -1).flatten(0, -2)
            chosen = all_pairs.choose(
                *self.transformed(query, key, keep), scores.flatten(0, -3), keep, self.bucket_size
            )
            return chosen.view(scores.shape)

    def transformed(
        self, query: torch.Tensor, key: torch.Tensor, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q (…, Lq, d'), P (…, Lk, d'), and a · P for each direction a: (…, T, d', Lk)."""
        norms = key.norm(dim=-1)
        if keep is not None:
            norms = norms.masked_fill(~keep, 0.0)
        bound = norms.amax(-1)[..., None, None].clamp(min=torch.finfo(norms.dtype).tiny ** 0.25)
        transformed_query, transformed_key = self.transform(query, key, bound)
        values = self.directions.to(transformed_key.dtype).flatten(0, 1) @ transformed_key.transpose(
            -1, -2
        )  # (…, T·d', Lk)
        return transformed_query, transformed_key, values.unflatten(-2, self.directions.shape[:2])


def _largest(x: torch.Tensor, count: int) -> torch.return_types.topk:
    """The `count` largest numbers of each row (…, L), or all of them.

    A traced graph serves any length, so there the rows are padded with `count` times −∞.
    """
    if traced():
        return functional.pad(x, (0, count), value=float("-inf")).topk(count, dim=-1)
    return x.topk(min(count, x.shape[-1]), dim=-1)


def _means(transformed_key: torch.Tensor, members: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The mean of each bucket's keys: (…, T, 2·d', d')."""
    shape = members.shape
    rows = (
        members.clamp(max=transformed_key.shape[-2] - 1)
        .flatten(-3)
        .unsqueeze(-1)
        .expand(*shape[:-3], -1, transformed_key.shape[-1])
    )
    gathered = transformed_key.gather(-2, rows).unflatten(-2, shape[-3:]) * held.unsqueeze(-1)
    return gathered.sum(-2) / held.sum(-1, keepdim=True).clamp(min=1)


def _is_marked(indices: torch.Tensor, length: int) -> torch.Tensor:
    """True at each index (…, n) of a row of `length`, and nowhere for the index `length`: (…, length)."""
    marked = torch.zeros(*indices.shape[:-1], length + 1, dtype=torch.bool, device=indices.device)
    return marked.scatter(-1, indices.clamp(max=length), 1)[
        ..., :length
    ]  # 1, because torch.jit does not support True here


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
