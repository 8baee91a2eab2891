"""Which keys a query may attend to, chosen from positions or from contents: the rules behind the `Sparse` logits."""

from __future__ import annotations

from .clustering import Clusters
from .hashing import Buckets
from .patterns import FixedBlocks, Strides

__all__ = ["Buckets", "Clusters", "FixedBlocks", "Strides"]
