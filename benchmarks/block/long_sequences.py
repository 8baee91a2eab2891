"""Times one attention block on long sequences: logits by distance and windows beside stock attention.

    python -m benchmarks.block.long_sequences
    python -m benchmarks.report.tables

One attention block as in benchmarks/block/attention.py, batch 1, without padding. `relative` has D = 128. A step of training is a
forward and a backward, up to 8,192 tokens. `same_library_speedup` is the ratio of the time of stock SDPA
with its projections through our library to the line's time, in the same interleaved run. Beyond 8,192 tokens stock runs once.
`random`, whose table grows with L², is measured up to 512 tokens.

`peak_mb` is the peak memory of one inference at the longest length, in a new process (benchmarks/block/memory.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.block.attention import inference, step
from benchmarks.block.blocks import SAME_LIBRARY, STOCK, WIDTH, WIDTH_ONE, build, estimated_bytes
from benchmarks.block.memory import in_fresh_process
from benchmarks.measurements.grid import FAILURES, Cell, Measured, make_quick, parser, reason, require_memory, walk
from benchmarks.measurements.records import Row
from hf_synthesizer.measuring.timing import Spread, interleaved

TABLE = "random"
VARIANTS = ("relative", "relative+salience", "relative (window 128)", "dot_product (window 128)", WIDTH_ONE, TABLE)
LONGEST_TABLE, STOCK_REPEATED, LONGEST_TRAINED = 512, 8192, 8192
"""The longest sequences on which `random` is measured, stock attention takes part in every round, and training is measured."""
FIELDS = ("same_library_ms", "same_library_speedup", "peak_mb")


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    made = parser(__doc__, "long_sequences.csv", VARIANTS)
    made.set_defaults(lengths=[512, 2048, 8192, 32768], batch_sizes=[1], padding=["none"])
    arguments = made.parse_args(argv)
    if arguments.quick:
        make_quick(arguments, ["relative", "dot_product (window 128)", TABLE])
        arguments.lengths, arguments.padding = [64, 256], ["none"]

    def measure(model: str, cell: Cell, variants: list[str]) -> list[Measured]:
        return measure_cell(cell, variants, arguments)

    walk("long_sequences", ("block",), arguments, measure, FIELDS)


def measure_cell(cell: Cell, variants: list[str], arguments: argparse.Namespace) -> list[Measured]:
    """The variants of a cell in one interleaved run, and stock SDPA."""
    if cell.train and cell.length > LONGEST_TRAINED:
        return []
    variants = [name for name in variants if name != TABLE or cell.length <= LONGEST_TABLE]
    torch.manual_seed(0)
    hidden_states = torch.randn(cell.batch_size, cell.length, WIDTH, dtype=cell.torch_dtype)
    gradient = torch.randn_like(hidden_states)
    hidden_states.requires_grad_(cell.train)
    blocks: dict[str, nn.Module] = {}
    runs: dict[str, Callable[[], object]] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys([STOCK, SAME_LIBRARY, *variants]):
        try:
            require_memory(estimated_bytes(name, cell.batch_size, cell.length, cell.torch_dtype, cell.train))
            block = blocks[name] = build(name, cell.length, cell.torch_dtype, cell.dropout, cell.train)
            run = step(block, hidden_states, None, gradient) if cell.train else inference(block, hidden_states, None)
            if name in variants:
                run()
            runs[name] = run
        except FAILURES as error:
            skipped[name] = reason(error)

    def forget_gradients() -> None:
        hidden_states.grad = None
        for block in blocks.values():
            block.zero_grad(set_to_none=True)

    once = [STOCK, SAME_LIBRARY] if cell.length > STOCK_REPEATED else []
    spreads = {name: timed_once(runs.pop(name)) for name in once}
    spreads |= interleaved(runs, arguments.repeats, arguments.seconds, before=forget_gradients)
    with_peaks = not cell.train and cell.length == max(arguments.lengths)  # each in a new process
    measured: list[Measured] = []
    for name in variants:
        row: Row = {}
        if name in spreads:
            row |= ratio(spreads[name], spreads[SAME_LIBRARY])
        if with_peaks and name != TABLE:
            row |= {"peak_mb": in_fresh_process(name, cell, arguments.threads).get("peak_mb", "")}
        measured.append((name, skipped.get(name) or spreads[name], spreads[STOCK], row))
    return measured


def timed_once(run: Callable[[], object]) -> Spread:
    """The time of a single run, without a warm-up."""
    start = time.perf_counter()
    run()
    return Spread.of([time.perf_counter() - start])


def ratio(spread: Spread, stock: Spread) -> Row:
    """How many times as fast as stock attention through the same library."""
    return {"same_library_ms": f"{stock.median:.3f}", "same_library_speedup": f"{stock.median / spread.median:.3f}"}


if __name__ == "__main__":
    main()
