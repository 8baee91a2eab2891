"""Draws speed against length and memory against length, from benchmarks/results.

python -m benchmarks.report.plots  # writes speed-*.png and memory-*.png beside the CSV files
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measurements.records import RESULTS, Row, read
from hf_synthesizer.pictures.figures import COLOURS, QUIET
from hf_synthesizer.pictures.lengths import MEMORY, curves, describe_conditions
from hf_synthesizer.plots import plot_lengths, save

SPEED = ("same_library_speedup", "times as fast as stock SDPA, same library")

FEW = ("stock sdpa", "floor", "random", "dense", "factorized_dense", "dense+salience", "random+dot_product")
"""What the README shows of all lines."""
BATCH_SIZES = {"64": "8", "128": "8", "512": "8", "1024": "8", "2048": "2", "4096": "1"}
"""Of the plots of speed, as the documents say; between larger and smaller batches a line would mean nothing."""


def here(rows: list[Row]) -> list[Row]:
    """The lines of one processor, at all it can do: that of the last line that was measured."""
    last = max(rows, key=lambda row: (not row.get("held_to"), row["date"]))["cpu"]
    return [row for row in rows if row["cpu"] == last and not row.get("held_to")]


def plot_cache(rows: list[Row]) -> Figure:
    """A bar for each kind of attention: what the cache of a decoder takes, relative to stock."""
    shares = {
        row["variant"]: float(row["cache_share"]) for row in rows if row["length"] == "256" and row["cache_share"]
    }
    figure = Figure((6.4, 0.3 * len(shares) + 0.8), layout="constrained")
    axis = figure.subplots()
    names = list(reversed(shares))
    axis.barh(
        names, [shares[name] for name in names], color=[QUIET if "stock" in name else COLOURS[0] for name in names]
    )
    axis.bar_label(axis.containers[0], fmt="{:.0%}", padding=3, fontsize=8)
    axis.set_xlim(0, 1.1)
    axis.xaxis.set_major_formatter("{x:.0%}")
    axis.set_xlabel("cache of the decoder's self-attention, relative to stock")
    return figure


def main(argv: list[str] | None = None) -> None:
    """Draw what there are results for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args(argv).results
    for file, (column, label) in (("attention", SPEED), ("memory", MEMORY)):
        rows = here(read(folder / f"{file}.csv"))
        if file == "attention":
            rows = [row for row in rows if BATCH_SIZES.get(row["length"]) == row["batch_size"]]
        for name, variants in curves(rows, column):
            kind = "speed" if file == "attention" else "memory"
            if (kind, name) == ("speed", "inference-none-float32"):
                few = {variant: variants[variant] for variant in FEW if variant in variants}
                save(plot_lengths(few, label), folder / "speed-few.png", dpi=90)
            save(plot_lengths(variants, label, describe_conditions(name)), folder / f"{kind}-{name}.png", dpi=110)
    save(plot_cache(read(folder / "decode.csv")), folder / "cache.png", dpi=90)


if __name__ == "__main__":
    main()
