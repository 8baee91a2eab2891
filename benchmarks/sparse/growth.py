"""How time grows with the length, fitted to what benchmarks/block/attention.py measured.

    python -m benchmarks.sparse.growth

Writes growth.csv: `exponent` is the slope of log(time) over log(length) by least squares, from 1024 to 4096, batch 1,
float32; `ms_4096` the median there, and `stock_eager_ms` and `stock_sdpa_ms` those of stock attention. `total_mb` is weights
and peak of one run at 4096, from memory.csv, and `stock_sdpa_total_mb` that of stock SDPA, in a ragged batch with its L × L
mask. The projections grow with the length itself, so that even a quadratic attention has an exponent below 2 here: compare
with stock.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

from benchmarks.block.blocks import CHOOSING, STOCK
from benchmarks.measurements.records import PROVENANCE, RESULTS, Row, read

LENGTHS = ("1024", "2048", "4096")
FIELDS = ("variant", "mode", "padding", "exponent", "ms_1024", "ms_4096", "stock_eager_ms", "stock_sdpa_ms")
FIELDS += ("total_mb", "stock_sdpa_total_mb", "threads")


def main(argv: list[str] | None = None) -> None:
    """Fit, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "growth.csv")
    output = parser.parse_args(argv).output
    times, memory = read(RESULTS / "attention.csv"), read(RESULTS / "memory.csv")
    rows = []
    for mode in ("inference", "train"):
        for padding in ("none", "ragged"):
            for variant in (STOCK, "stock eager", *CHOOSING):
                row = line(times, memory, variant, mode, padding)
                if row:
                    rows.append(row)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *PROVENANCE], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def line(times: list[Row], memory: list[Row], variant: str, mode: str, padding: str) -> Row | None:
    """One variant under one set of conditions, if it was measured."""

    def found(rows: list[Row], name: str, column: str, length: str = "4096") -> Row | None:
        conditions = {"variant": name, "mode": mode, "padding": padding, "dtype": "float32", "dropout": "0.0"}
        conditions |= {"length": length, "batch_size": "1", "status": "ok"}
        return next((row for row in rows if all(row[key] == value for key, value in conditions.items())), None)

    measured = [found(times, variant, "median_ms", length) for length in LENGTHS]
    if None in measured:
        return None
    points = [(math.log(float(row["length"])), math.log(float(row["median_ms"]))) for row in measured if row]
    last = measured[-1] or {}
    eager, ours, stock = (
        found(times, "stock eager", "median_ms"),
        found(memory, variant, "total_mb"),
        found(memory, STOCK, "total_mb"),
    )
    return {
        **last,
        "exponent": f"{slope(points):.2f}",
        "ms_1024": (measured[0] or {})["median_ms"],
        "ms_4096": last["median_ms"],
        "stock_eager_ms": eager["median_ms"] if eager else "",
        "stock_sdpa_ms": last["stock_sdpa_ms"],
        "total_mb": ours["total_mb"] if ours else "",
        "stock_sdpa_total_mb": stock["total_mb"] if stock else "",
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line with the least squared error."""
    x_mean, y_mean = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)


if __name__ == "__main__":
    main()
