"""Rules that choose the keys of each query, by position or by content, for `Sparse` logits."""

from __future__ import annotations

from .clustering import Clusters
from .hashing import Buckets
from .patterns import FixedBlocks, Strides

__all__ = ["Buckets", "Clusters", "FixedBlocks", "Strides"]
