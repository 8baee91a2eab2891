"""The blocks of keys that a block of queries sees through a window."""

from __future__ import annotations

from typing import Any

QUERIES = 64  # of a block, which is a tile of the kernels


def near_blocks(block: Any, window: int) -> tuple[Any, Any]:
    """The first block of QUERIES keys that a block of queries sees through a window, and the last one + 1."""
    return (block * QUERIES - window + 1) // QUERIES, (block * QUERIES + QUERIES - 1 + window + QUERIES - 1) // QUERIES
