"""What the kernels are compiled for, and their block sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

PRECISION = "tf32x3"
"""Products in float32 take three passes of the tensor cores, exact to float32. Other dtypes ignore this."""
KERNELS = ("forward", "keys", "queries", "table")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256)
"""Of values and of low-rank terms: narrower ones are padded."""


class Blocks(NamedTuple):
    """Block sizes of a kernel: queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


BLOCKS = {
    ("forward", 2, 64): Blocks(64, 32, 8, 2),
    ("forward", 2, 128): Blocks(64, 32, 8, 2),
    ("forward", 2, 256): Blocks(32, 16, 8, 1),
    ("forward", 4, 64): Blocks(32, 16, 4, 1),
    ("forward", 4, 128): Blocks(32, 16, 8, 1),
    ("forward", 4, 256): Blocks(32, 16, 8, 1),
    ("keys", 2, 64): Blocks(32, 32, 4, 2),
    ("keys", 2, 128): Blocks(32, 32, 8, 2),
    ("keys", 2, 256): Blocks(16, 32, 8, 1),
    ("keys", 4, 64): Blocks(32, 16, 4, 2),
    ("keys", 4, 128): Blocks(32, 16, 8, 1),
    ("keys", 4, 256): Blocks(16, 16, 8, 1),
    ("queries", 2, 64): Blocks(32, 32, 8, 2),
    ("queries", 2, 128): Blocks(32, 32, 8, 2),
    ("queries", 2, 256): Blocks(32, 16, 4, 2),
    ("queries", 4, 64): Blocks(32, 16, 4, 2),
    ("queries", 4, 128): Blocks(32, 16, 8, 1),
    ("queries", 4, 256): Blocks(32, 16, 8, 1),
    ("table", 2, 64): Blocks(64, 16, 8, 2),
    ("table", 2, 128): Blocks(32, 16, 4, 2),
    ("table", 2, 256): Blocks(32, 32, 8, 2),
    ("table", 4, 64): Blocks(64, 32, 8, 2),
    ("table", 4, 128): Blocks(32, 32, 8, 2),
    ("table", 4, 256): Blocks(32, 32, 8, 1),
}
"""By kernel, bytes of a number and width: large blocks with which no kernel spills registers (see
benchmarks/scaling/kernel_resources.py). Their speed on a GPU is not measured."""


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for. Lengths, factors, masks, causality and dropout are run-time arguments.

    With an outer product, or without any term, there is always a table, which may be zeros. A kernel without it would
    save only a load from the cache.
    """

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
        """Compile-time arguments of the kernel."""
        return {
            "LOW_RANK": self.low_rank,
            "STATIC": self.static,
            "TILED": self.tiled,
            "WIDTH": self.width,
            "ROWS": self.blocks.rows,
            "KEYS": self.blocks.keys,
            "PART": 64 if self.dtype.itemsize == 2 else 32,
            "PRECISION": PRECISION,
        }

    @classmethod
    def all(cls) -> list[Specialisation]:
        """All specialisations that can be launched."""
        forms = ((True, False, False), *product((False, True), (True,), (False, True)))
        return [
            cls(kernel, dtype, width, *form)
            for kernel, dtype, width, form in product(KERNELS, DTYPES, WIDTHS, forms)
            if (kernel != "table" or form[1]) and (kernel != "queries" or form[0] or form[2])
        ]
