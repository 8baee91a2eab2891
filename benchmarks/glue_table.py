#!/usr/bin/env python
"""The table and the plot of the GLUE benchmark, from the files that benchmarks/glue.py wrote.

python benchmarks/glue_table.py    # prints the table, and writes table.md and scores.png beside the results
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "glue"
TASKS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}

Results = list[dict[str, Any]]


def read(folder: Path) -> Results:
    """All results."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]


def relative(row: dict[str, Any], results: Results) -> float | None:
    """A score as a share of the stock model's on the same task and seed."""
    stock = [r for r in results if r["variant"] == "stock" and (r["task"], r["seed"]) == (row["task"], row["seed"])]
    return row["score"] / stock[0]["score"] if stock and stock[0]["score"] else None


def group(results: Results) -> dict[tuple[str, bool], Results]:
    """The results of each line of the table: a variant, with transfer or without."""
    lines: dict[tuple[str, bool], Results] = defaultdict(list)
    for row in results:
        lines[row["variant"], row["transfer"]].append(row)
    return lines


def cell(rows: Results) -> str:
    """A score, with the standard deviation where there are several seeds."""
    scores = [100 * row["score"] for row in rows]
    if not scores:
        return ""
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"


def mean_relative(rows: Results, results: Results) -> float | None:
    """The mean over tasks of the relative score (over its seeds), for the tasks that the rows have."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = relative(row, results)
        if value is not None:
            by_task[row["task"]].append(value)
    return statistics.mean(statistics.mean(values) for values in by_task.values()) if by_task else None


def table(results: Results) -> str:
    """As Markdown. Scores in points of 100; the mean relative to stock over the tasks that the line has."""
    head = ["attention", *TASKS.values(), "mean to stock", "parameters", "transfer", "fine-tuning", "examples/s"]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    for (variant, transfer), rows in group(results).items():
        first = [row for row in rows if row["seed"] == 0]
        share = mean_relative(rows, results)
        name = variant if variant == "stock" or transfer else f"{variant}, fresh logits"
        cells = [f"`{name}`" if variant != "stock" else "stock"]
        cells += [cell([row for row in rows if row["task"] == task]) for task in TASKS]
        cells += ["" if share is None else f"{share:.1%}"]
        cells += [f"{max(row['parameters'] for row in rows) / 1e6:.1f} M"]
        cells += [f"{rows[0]['transfer_seconds']:.0f} s" if transfer else ""]
        cells += [f"{statistics.mean(row['train_seconds'] for row in first or rows):.0f} s"]
        cells += [f"{statistics.mean(row['examples_per_second'] for row in first or rows):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """The mean relative score of each variant, with transfer and on its tasks, and with fresh logits."""
    bars = [
        (f"{variant}{'' if transfer else ', fresh'}", share, transfer)
        for (variant, transfer), rows in group(results).items()
        if variant != "stock" and (share := mean_relative(rows, results)) is not None
    ]
    bars.sort(key=lambda bar: bar[1])
    figure, axis = pyplot.subplots(figsize=(8, 0.35 * len(bars) + 1.2))
    axis.barh(
        [name for name, _, _ in bars],
        [100 * share for _, share, _ in bars],
        color=["#2f6f9f" if transfer else "#c9d6df" for _, _, transfer in bars],
    )
    axis.axvline(100, color="black", linewidth=1)
    lowest = min((share for _, share, _ in bars), default=0.9)
    axis.set_xlim(max(0, 100 * lowest - 5), 103)
    axis.set_xlabel("mean score relative to stock, %")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args(argv).results
    results = read(folder)
    if not results:
        sys.exit(f"There are no results in {folder}: run benchmarks/glue.py first.")
    # stock first, then by mean
    order = {key: -(mean_relative(rows, results) or 0) for key, rows in group(results).items()}
    results.sort(
        key=lambda row: (row["variant"] != "stock", not row["transfer"], order[row["variant"], row["transfer"]])
    )
    text = table(results)
    print(text)
    (folder / "table.md").write_text(text + "\n")
    plot(results, folder / "scores.png")


if __name__ == "__main__":
    main()
