"""Times what was tried on the way to the fast routes, beside what was kept. benchmarks/tried.md tells the story.

    python -m benchmarks.block.explore  # a few minutes on two cores; the compiled ways need a C++ compiler

Each experiment is one interleaved run. `relative` is the time of the way that was kept by that of the line: below 1, the
line is slower.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from tqdm import tqdm

import hf_synthesizer.attend
from benchmarks.block.attention import inference, step
from benchmarks.block.blocks import HEADS, STOCK, WIDTH, build
from benchmarks.measurements.bystanders import Bystanders
from benchmarks.measurements.records import RESULTS, Results, quick_output
from hf_synthesizer.attend import attend, chunk_inputs
from hf_synthesizer.device.matmul import linear, product
from hf_synthesizer.logits.forms import Tiled
from hf_synthesizer.measuring.timing import interleaved
from hf_synthesizer.synthesizers.factorized_dense import default_factors

FIELDS = ("median_ms", "p20_ms", "p80_ms", "rounds", "relative", "gflops", "others")
HEAD_WIDTH = WIDTH // HEADS
Runs = dict[str, Callable[[], object]]
Experiment = tuple[Runs, int, float]
"""The ways (the kept one first), the length, and the billions of floating point operations of a run, or 0."""


def bias(length: int) -> Experiment:
    """A `random` table handed to SDPA as its bias, with queries and keys of zeros."""
    batch_size = 2
    block = build("random", length, torch.float32).attention
    hidden_states = torch.randn(batch_size, length, WIDTH)
    value = torch.randn(batch_size, HEADS, length, HEAD_WIDTH)
    zeros = torch.zeros_like(value)
    table = torch.randn(1, HEADS, length, length).expand(batch_size, -1, -1, -1)

    def route() -> None:
        with torch.no_grad():
            block(hidden_states, None)

    def handed() -> None:
        with torch.no_grad():
            block.value(hidden_states)
            functional.scaled_dot_product_attention(zeros, zeros, value, attn_mask=table)

    return {"static route": route, "bias of scaled_dot_product_attention": handed}, length, 0.0


def softmax(length: int) -> Experiment:
    """A tile's softmax, or only exp, the normaliser coming from a column of ones beside the values."""
    tile, values = torch.randn(length, length), torch.randn(length, HEAD_WIDTH)
    with_ones = torch.cat((values, torch.ones(length, 1)), dim=-1)

    def normalised() -> None:
        product(torch.softmax(tile, -1), values)

    def ones() -> None:
        made = product(torch.exp(tile), with_ones)
        made[:, :-1] / made[:, -1:]

    return {"softmax, then product": normalised, "exp, then product with ones": ones}, length, 0.0


def exponential(length: int) -> Experiment:
    """The softmax of a tile, and its exponential alone."""
    tile = torch.randn(length, length)
    return {"torch.softmax": partial(torch.softmax, tile, -1), "torch.exp": partial(torch.exp, tile)}, length, 0.0


def library(length: int) -> Experiment:
    """A product of (L, L) weights and (L, 512) values, by the two libraries inside PyTorch."""
    weights, columns = torch.rand(length, length), torch.randn(length, 8 * HEAD_WIDTH)
    runs = {"oneDNN": partial(product, weights, columns), "torch.mm": partial(torch.mm, weights, columns)}
    return runs, length, 2 * length * length * columns.shape[1] / 1e9


def projection(length: int) -> Experiment:
    """A value projection of 8 sequences, forward alone, by oneDNN and by `nn.Linear`."""
    module, hidden_states = torch.nn.Linear(WIDTH, WIDTH), torch.randn(8, length, WIDTH)
    runs = {"oneDNN": partial(linear, module, hidden_states), "nn.Linear": partial(module, hidden_states)}
    return runs, length, 2 * hidden_states.numel() * WIDTH / 1e9


def layout(length: int) -> Experiment:
    """The same product, transposed: the values' columns as rows, so that weights are read as columns."""
    weights, columns = torch.rand(length, length), torch.randn(length, 8 * HEAD_WIDTH)
    rows = columns.t().contiguous()
    runs = {
        "weights @ values": partial(product, weights, columns),
        "valuesᵀ @ weightsᵀ": partial(product, rows, weights.t()),
    }
    return runs, length, 2 * length * length * columns.shape[1] / 1e9


def tile_rows(length: int) -> Experiment:
    """Training steps of `dense` with chunks of as many queries; stock SDPA beside them."""
    hidden_states = torch.randn(2, length, WIDTH, requires_grad=True)
    gradient = torch.randn(2, length, WIDTH)
    made = step(build("dense", length, torch.float32, train=True), hidden_states, None, gradient)
    kept = chunk_inputs.PROCESSOR_QUERIES

    def with_rows(rows: int) -> None:
        chunk_inputs.PROCESSOR_QUERIES = rows
        try:
            made()
        finally:
            chunk_inputs.PROCESSOR_QUERIES = kept

    stock = step(build(STOCK, length, torch.float32, train=True), hidden_states, None, gradient)
    counts = [kept, *(rows for rows in (64, 128, 256, 512, 1024) if rows != kept)]
    return {**{f"{rows} rows": partial(with_rows, rows) for rows in counts}, STOCK: stock}, length, 0.0


def short(variant: str, dtype: torch.dtype, length: int) -> Experiment:
    """Training steps on 32 short rows: plain operations on the whole batch, or chunks row by row; stock beside them."""
    hidden_states = torch.randn(32, length, WIDTH, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(hidden_states)
    made, *stock = (
        step(build(name, length, dtype, train=True), hidden_states, None, gradient)
        for name in (variant, STOCK, "stock eager")
    )

    def by_routes() -> None:
        with mock.patch.multiple(hf_synthesizer.attend, FEW_LOGITS=0, FEW_TILED_LOGITS=0):
            made()

    runs = {"the whole batch": made, "row by row": by_routes, STOCK: stock[0], "stock eager": stock[1]}
    return runs, length, 0.0


def batch(length: int) -> Experiment:
    """What a longer batch costs the static route, against rows of the batch one by one."""
    block = build("random", length, torch.float32)
    hidden_states = torch.randn(8, length, WIDTH)
    parts = [inference(block, row, None) for row in hidden_states.split(1)]

    def one_by_one() -> None:
        for part in parts:
            part()

    return {"one product for the batch": inference(block, hidden_states, None), "row by row": one_by_one}, length, 0.0


def compiled(variant: str, length: int) -> Experiment:
    """A block run by our eager routes, and the same block under torch.compile, which is given plain operations."""
    block = build(variant, length, torch.float32)
    hidden_states = torch.randn(4, length, WIDTH)
    runs = {
        "eager routes": inference(block, hidden_states, None),
        "torch.compile": inference(torch.compile(block, dynamic=False), hidden_states, None),  # type: ignore[arg-type]
    }
    return runs, length, 0.0


def flex(length: int) -> Experiment:
    """The tiled logits of `factorized_dense` as the score function of a compiled FlexAttention."""
    a, b = default_factors(length)
    inner, outer = torch.randn(4, HEADS, length, a), torch.randn(4, HEADS, length, b)
    value = torch.randn(4, HEADS, length, HEAD_WIDTH)
    zeros = torch.zeros_like(value)
    attention = torch.compile(flex_attention, dynamic=False)

    def score(
        _: torch.Tensor, row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return inner[row, head, query, key % a] * outer[row, head, query, key // a]

    def route() -> None:
        with torch.no_grad():
            attend(Tiled(inner, outer, length), value)

    def flexible() -> None:
        with torch.no_grad():
            attention(zeros, zeros, value, score_mod=score)

    return {"chunked route": route, "FlexAttention": flexible}, length, 0.0


EXPERIMENTS: dict[str, tuple[Callable[[int], Experiment], int]] = {
    "table as bias": (bias, 2048),
    "softmax of a tile": (softmax, 512),
    "softmax and exp of a tile": (exponential, 512),
    "matrix product": (library, 512),
    "long matrix product": (library, 2048),
    "projection": (projection, 512),
    "layout of the product": (layout, 512),
    "rows of a tile in training": (tile_rows, 2048),
    "random+dot_product, short rows": (partial(short, "random+dot_product", torch.float32), 32),
    "dense+salience, short rows": (partial(short, "dense+salience", torch.float32), 32),
    "random+dot_product, short rows in bf16": (partial(short, "random+dot_product", torch.bfloat16), 32),
    "dense+salience, short rows in bf16": (partial(short, "dense+salience", torch.bfloat16), 32),
    "batch of the static route": (batch, 512),
    "random, compiled": (partial(compiled, "random"), 512),
    "dense, compiled": (partial(compiled, "dense"), 512),
    "factorized_dense, compiled": (partial(compiled, "factorized_dense"), 512),
    "factorized_dense, FlexAttention": (flex, 512),
}


def main(argv: list[str] | None = None) -> None:
    """Run the experiments, and write them down."""
    os.environ["HF_SYNTHESIZER_NATIVE"] = (
        "0"  # what was tried is compared with the routes that serve without native kernels
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "explore.csv")
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="these experiments")
    parser.add_argument("--threads", type=int, help="how many cores to use (default: torch's choice)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds, at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="for an experiment")
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = Results(quick_output(arguments.output) if arguments.quick else arguments.output, FIELDS)
    if arguments.quick:  # a compiler takes its time, however small the run
        arguments.only = [name for name in arguments.only if "compiled" not in name and "Flex" not in name]
    for name in tqdm(arguments.only, unit="experiment", desc="explore"):
        experiment, length = EXPERIMENTS[name]
        torch.manual_seed(0)
        runs, length, gigaflops = experiment(32 if arguments.quick else length)
        bystanders = Bystanders()
        spreads = interleaved(runs, arguments.repeats, 0.0 if arguments.quick else arguments.seconds)
        others, first = f"{bystanders.cores():.2f}", next(iter(spreads.values()))
        results.add(
            *(
                {
                    "benchmark": "explore",
                    "model": name,
                    "variant": way,
                    "length": str(length),
                    "threads": str(torch.get_num_threads()),
                    **spread.row(),
                    "relative": f"{first.median / spread.median:.3f}",
                    "gflops": f"{1e3 * gigaflops / spread.median:.0f}" if gigaflops else "",
                    "others": others,
                }
                for way, spread in spreads.items()
            )
        )


if __name__ == "__main__":
    main()
