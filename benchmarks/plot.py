#!/usr/bin/env python
"""Draws speed against length and memory against length, from benchmarks/results.

python benchmarks/plot.py              # writes speed-*.png and memory-*.png beside the CSV files
"""

from __future__ import annotations

import argparse
from pathlib import Path

from records import RESULTS, Row, read

from hf_synthesizer.plots import plot_lengths, save
from hf_synthesizer.plots.lengths import MEMORY, curves

SPEED = ("same_library_speedup", "times as fast as stock SDPA, same library")


def here(rows: list[Row]) -> list[Row]:
    """The lines of one processor, at all it can do: that of the last line that was measured."""
    last = max(rows, key=lambda row: (row.get("held_to", "") == "", row["date"]))["cpu"]
    return [row for row in rows if row["cpu"] == last and not row.get("held_to")]


def main(argv: list[str] | None = None) -> None:
    """Draw what there are results for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args(argv).results
    for file, (column, label) in (("attention", SPEED), ("memory", MEMORY)):
        for name, variants in curves(here(read(folder / f"{file}.csv")), column):
            kind = "speed" if file == "attention" else "memory"
            save(plot_lengths(variants, label, name.replace("-", ", ")), folder / f"{kind}-{name}.png", dpi=110)


if __name__ == "__main__":
    main()
