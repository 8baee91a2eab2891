"""What a form has to cost on this machine: its products at the measured peak, and one exponential a weight.

`peak` and `exponentials` are measured, all threads together; `own_floor` counts what each form of logits cannot do without.
Counted are the projections (BERT's output projection among them), the products that make logits, weights times values, and one
exponential for each weight; not counted is whatever moves numbers without multiplying them. A backward has each product
twice more, once for each factor, and takes no exponential, as if all weights had been kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from benchmarks.block.blocks import HEADS, WIDTH
from hf_synthesizer.device.matmul import _LINEAR

HEAD = WIDTH // HEADS


class Work(NamedTuple):
    """Multiply-adds and exponentials of a forward."""

    projections: float
    products: float
    exponentials: float


@cache
def peak(dtype: torch.dtype) -> float:
    """Multiply-adds a second of the fastest matrix product found: both libraries, several shapes, the best of many runs."""
    best = 0.0
    for rows, columns, depth in ((1024, 768, 768), (4096, 768, 768), (2048, 2048, 512)):
        a, b = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        ways: list[Callable[[], object]] = [lambda a=a, b=b: a @ b.t()]
        if _LINEAR is not None and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            ways.append(lambda a=a, b=b: _LINEAR(a, b, None, "none", [], ""))  # type: ignore[operator]
        best = max([best, *(rows * columns * depth / fastest(way) for way in ways)])
    return best


@cache
def exponentials() -> float:
    """Exponentials a second in float32, of rows that stay in the cache."""
    rows = torch.randn(64, 1024)
    out = torch.empty_like(rows)
    single = torch.get_num_threads()
    torch.set_num_threads(1)  # a tensor that stays in one core's cache is too small to be shared
    try:
        return rows.numel() / fastest(lambda: torch.exp(rows, out=out)) * single
    finally:
        torch.set_num_threads(single)


def fastest(run: Callable[[], object], seconds: float = 0.3) -> float:
    """The shortest of the runs that fit into so many seconds."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def own_floor(variant: str, length: int, batch_size: int, dtype: torch.dtype, train: bool) -> float | None:
    """Milliseconds that a form costs at least, or None for what is no form of ours."""
    work = work_of(variant, length, batch_size)
    if work is None:
        return None
    multiply_adds = (work.projections + work.products) * (3 if train else 1)
    return 1e3 * (multiply_adds / peak(dtype) + work.exponentials / exponentials())


def work_of(variant: str, length: int, batch_size: int) -> Work | None:
    """What a variant computes of (batch_size, length, 768)."""
    projection = batch_size * length * WIDTH**2
    pairs = batch_size * HEADS * length**2
    given = Work(2 * projection, pairs * HEAD, 0)  # values, output; weights times values
    name, fused = variant.removesuffix(" (fused)"), variant.endswith(" (fused)")
    if name == "floor":
        return given
    if name.startswith("stock sdpa"):
        return Work(4 * projection, 2 * pairs * HEAD, pairs)
    parts = name.split("+")
    if any(part not in PARTS for part in parts):
        return None
    projections, products = given.projections, given.products
    exponentials = 0 if fused else HEADS * length**2  # a static table is softmaxed once for the whole batch
    for part in parts:
        more, rank = PARTS[part]
        projections += more * projection
        products += rank * pairs
        if more >= 1:
            exponentials = pairs
    if name.startswith("factorized_random") and not fused:
        products += 8 * HEADS * length**2
    return Work(projections, products, exponentials)


PARTS = {
    "random": (0, 0),
    "fixed_random": (0, 0),
    "factorized_random": (0, 0),
    "dense": (1, HEAD),
    "factorized_dense": (1, 1),
    "dot_product": (2, HEAD),
    "salience": (HEADS / WIDTH, 0),
}
"""Projections of width 768 that make the logits, and multiply-adds for each of them."""
