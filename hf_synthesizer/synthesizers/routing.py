"""The Routing Transformer: a query attends to the keys of its own cluster."""

from __future__ import annotations

from math import isqrt

import torch
from torch import nn

from ..choices import Clusters
from .registry import register_variant
from .shared_projection import SharedProjectionSynthesizer


@register_variant("routing")
class RoutingSynthesizer(SharedProjectionSynthesizer):
    """Shared queries and keys; a query attends to the keys in its own cluster of √L.

    `routing` sorts the tokens of a text into √L clusters. A query attends to the keys in its own cluster.

    The initial centroids of the clusters are drawn once with torch's generator, and saved.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling where i and j are in one cluster"
    whole_sequence = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        count = max(1, isqrt(self.max_length))
        self.register_buffer("directions", orthogonal_directions(count, self.head_dim))  # (√N, d_h)

    def choice(self) -> Clusters:
        return Clusters(self.directions)  # type: ignore[arg-type]


def orthogonal_directions(count: int, width: int) -> torch.Tensor:
    """Draw unit vectors, (count, width), in blocks of `width` orthogonal vectors."""
    blocks = [nn.init.orthogonal_(torch.empty(width, width)) for _ in range(-(-count // width))]
    return torch.cat(blocks)[:count]
