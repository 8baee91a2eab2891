"""Times a static layer that `fuse_for_inference(tolerance=…)` has compressed, against length.

    python -m benchmarks.block.compression
    python -m benchmarks.report.tables

One attention block as in benchmarks/block/attention.py, inference, batch 1: stock SDPA, `factorized_random` as it is, fused, and
fused with a tolerance. Its table is as drawn at initialisation; what rank a trained table needs, only the table can say.
`rank` and `error` are the report's. `growth` is the exponent of L in the median time between the length before and this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tqdm import tqdm

from benchmarks.block.attention import inference
from benchmarks.block.blocks import STOCK, WIDTH, build
from benchmarks.measurements.grid import TIMING_FIELDS, Cell, outcome, parser
from benchmarks.measurements.records import Results, quick_output
from hf_synthesizer import fuse_for_inference
from hf_synthesizer.measuring.timing import interleaved

VARIANT = "factorized_random"
TOLERANCES = (0.1, 0.01)


def main(argv: list[str] | None = None) -> None:
    """Measure all lengths."""
    made = parser(__doc__, "compression.csv", (VARIANT,))
    made.set_defaults(batch_sizes=[1], lengths=[512, 1024, 2048, 4096])
    arguments = made.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        arguments.lengths, arguments.repeats = [64, 128], 3
    results = Results(arguments.output, (*TIMING_FIELDS, "rank", "error", "growth"))
    before: dict[str, tuple[int, float]] = {}
    for length in tqdm(arguments.lengths, unit="length", desc="compression"):
        hidden_states = torch.randn(1, length, WIDTH)
        runs: dict[str, Callable[[], object]] = {}
        facts: dict[str, dict[str, str]] = {}
        for name, tolerance in ((STOCK, None), (VARIANT, None), (f"{VARIANT} (fused)", None), *compressed()):
            block = build(name if name == STOCK else VARIANT, length, torch.float32)
            if name not in (STOCK, VARIANT):
                (layer,) = fuse_for_inference(block, tolerance=tolerance).layers
                facts[name] = {"rank": str(layer.rank or ""), "error": f"{layer.error:.2e}"}
            runs[name] = inference(block, hidden_states, None)
        spreads = interleaved(runs, arguments.repeats, arguments.seconds)
        cell = Cell("inference", "none", "float32", 0.0, length, 1)
        for name, spread in spreads.items():
            row = {**cell.row("compression", "block", name), **outcome(spread, spreads[STOCK]), **facts.get(name, {})}
            if name in before:
                shorter, median = before[name]
                row["growth"] = f"{math.log(spread.median / median) / math.log(length / shorter):.2f}"
            before[name] = length, spread.median
            results.add(row)


def compressed() -> list[tuple[str, float]]:
    """Names and tolerances."""
    return [(f"{VARIANT} (tolerance {tolerance:g})", tolerance) for tolerance in TOLERANCES]


if __name__ == "__main__":
    main()
