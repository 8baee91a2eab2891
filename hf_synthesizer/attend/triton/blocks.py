"""For what the kernels are compiled, and in which blocks they then work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

PRECISION = "tf32x3"
"""Of products in float32: three passes of the tensor cores, which together are exact to float32. No other dtype asks."""
WIDTHS = (64, 128, 256)
"""Of values and of low-rank terms: narrower ones are padded."""


class Blocks(NamedTuple):
    """How a kernel cuts its work: queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


BLOCKS = {
    (kernel, itemsize, width): Blocks(64 if width < 128 else 32, 32, 8 if itemsize == 4 else 4, 2)
    for kernel in ("forward", "keys", "queries", "table")
    for itemsize in (2, 4)
    for width in WIDTHS
}


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for. Lengths, factors, masks, causality and dropout are arguments, and no part of it."""

    kernel: str
    dtype: torch.dtype
    width: int
    low_rank: bool
    static: bool
    tiled: bool

    @property
    def blocks(self) -> Blocks:
        return BLOCKS[self.kernel, self.dtype.itemsize, self.width]

    def constants(self) -> dict[str, Any]:
        """The arguments that are known when the kernel is compiled."""
        return {
            "LOW_RANK": self.low_rank,
            "STATIC": self.static,
            "TILED": self.tiled,
            "WIDTH": self.width,
            "ROWS": self.blocks.rows,
            "KEYS": self.blocks.keys,
            "PRECISION": PRECISION,
        }

    @classmethod
    def all(cls) -> list[Specialisation]:
        """Every one that can be launched."""
        return [
            cls(kernel, dtype, width, low_rank, static, tiled)
            for kernel in ("forward", "keys", "queries", "table")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for width in WIDTHS
            for low_rank in (False, True)
            for static in (False, True)
            for tiled in (False, True)
            if (kernel != "table" or static) and (kernel != "queries" or low_rank or tiled)
        ]
