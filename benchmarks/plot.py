#!/usr/bin/env python
"""Draws speed against length and memory against length, from benchmarks/results.

python benchmarks/plot.py              # writes speed-*.png and memory-*.png beside the CSV files
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from records import RESULTS, Row, read

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

SPEED = ("speedup", "times as fast as stock SDPA")
MEMORY = ("peak_mb", "peak memory of a run, MB")


def curves(rows: list[Row], column: str) -> Iterator[tuple[str, dict[str, list[tuple[int, float]]]]]:
    """For each set of conditions but the length, a name and the points of each variant.

    The batch size may differ from length to length: where there are several, the largest counts.
    """
    groups: dict[str, dict[str, dict[int, tuple[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["status"] != "ok":
            continue
        name = "-".join((row["mode"], row["padding"], row["dtype"]))
        if row["dropout"] != "0.0":
            name += f"-dropout-{row['dropout']}"
        points, length, batch_size = groups[name][row["variant"]], int(row["length"]), int(row["batch_size"])
        if length not in points or points[length][0] < batch_size:
            points[length] = batch_size, float(row[column])
    for name, variants in groups.items():
        found = {
            variant: sorted((length, number) for length, (_, number) in points.items())
            for variant, points in variants.items()
        }
        if any(len(points) > 1 for points in found.values()):
            yield name, found


def draw(variants: dict[str, list[tuple[int, float]]], label: str, title: str, path: Path) -> None:
    """One plot; stock is black, what is fused dashed, floor and peers grey."""
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for variant, points in variants.items():
        style = "--" if variant.endswith(" (fused)") else "-"
        color = None
        if variant.startswith("stock"):
            color, style = "black", "-" if variant == "stock sdpa" else ":"
        elif variant in ("floor", "fnet", "nystromformer", "linformer"):
            color, style = "grey", {"floor": "-", "fnet": ":", "nystromformer": "--"}.get(variant, "-.")
        axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=color, label=variant)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({length for points in variants.values() for length, _ in points})
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("length")
    axis.set_ylabel(label)
    axis.set_title(title)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Draw what there are results for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args(argv).results
    for file, (column, label) in (("attention", SPEED), ("memory", MEMORY)):
        for name, variants in curves(read(folder / f"{file}.csv"), column):
            kind = "speed" if file == "attention" else "memory"
            draw(variants, label, name.replace("-", ", "), folder / f"{kind}-{name}.png")


if __name__ == "__main__":
    main()
