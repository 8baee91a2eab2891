"""The keys of a query's own cluster (the Routing Transformer, Roy et al. 2021, arXiv 2003.05997).

Each row and head clusters its own tokens, by spherical k-means: x̂ = x / ‖x‖, K = √L rounded down for L tokens. The first
assignment is an orthogonal projection: token x̂ starts in the cluster c whose fixed direction w_c, a row of an orthogonal matrix,
has the largest w_c · x̂. Then, `ITERATIONS` times, each centroid becomes the normalised sum of its tokens, and each token moves to
the centroid with the largest inner product. A cluster that lost all its tokens stays empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch.nn import functional

from ..device.autocast import without_autocast
from ..logits.choice import Choice
from ..logits.tokens import Tokens

ITERATIONS = 5


@dataclass(frozen=True)
class Clusters(Choice):
    """The rule; `directions` is (at least K, d)."""

    directions: torch.Tensor

    def labels(self, key: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """The cluster of each token: (…, L), for x = `key` (…, L, d). `keep` broadcasts to (…, L)."""
        with torch.no_grad(), without_autocast(key.device):
            key = functional.normalize(key.to(torch.promote_types(key.dtype, torch.float32)), dim=-1)
            directions = self.directions.to(key.dtype)
            if keep is None:
                directions = directions[: max(1, isqrt(key.shape[-2]))]
            affinity = key @ directions.transpose(-1, -2)  # (…, L, K)
            if keep is not None:
                count = keep.sum(-1, keepdim=True).double().sqrt().long().clamp(min=1)  # (…, 1)
                beyond = torch.arange(len(directions), device=key.device) >= count  # (…, K)
                affinity = affinity.masked_fill(beyond.unsqueeze(-2), float("-inf"))
            for _ in range(ITERATIONS):
                members = torch.zeros_like(affinity).scatter(-1, affinity.argmax(-1, keepdim=True), 1.0)  # (…, L, K)
                if keep is not None:
                    members = members * keep.unsqueeze(-1)
                empty = members.sum(-2, keepdim=True) == 0  # (…, 1, K)
                centroids = functional.normalize(members.transpose(-1, -2) @ key, dim=-1)  # (…, K, d)
                affinity = (key @ centroids.transpose(-1, -2)).masked_fill(empty, float("-inf"))
            return affinity.argmax(-1)

    def chosen(self, query: torch.Tensor, key: torch.Tensor, tokens: Tokens, causal: bool) -> torch.Tensor:
        keep = None if tokens.keep is None else tokens.keep.unsqueeze(1)  # (B, 1, Lk)
        labels = self.labels(key, keep)  # (B, H, Lk)
        indices = tokens.query_indices(key.device)[0].clamp(max=tokens.key_length - 1)
        return labels[..., indices].unsqueeze(-1) == labels.unsqueeze(-2)
