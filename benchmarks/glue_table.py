#!/usr/bin/env python
"""The tables and the plot of the GLUE benchmark, from the files that benchmarks/glue.py wrote.

    python benchmarks/glue_table.py            # writes scores.png beside the results, and the tables into the documents
    python benchmarks/glue_table.py --check    # only says whether documents and results agree

`<!-- table: glue (benchmarks/glue_table.py) -->` … `<!-- end of table -->` is where the table `glue` goes.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from table_places import write_tables  # noqa: E402
from table_text import markdown  # noqa: E402

from hf_synthesizer.plots.figures import COLOURS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "glue"
PROBES = ROOT / "benchmarks" / "results" / "glue_probes.csv"
DOCUMENTS = tuple(ROOT / "docs" / name for name in ("glue.md", "transfer.md", "sparse.md"))
PALE = "#c9d6df"
TASKS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}
Results = list[dict[str, Any]]


def read(folder: Path) -> Results:
    """All results."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]


def relative(row: dict[str, Any], results: Results, key: str = "score") -> float | None:
    """A score as a share of the stock model's on the same task and seed."""
    stock = [r for r in results if r["variant"] == "stock" and (r["task"], r["seed"]) == (row["task"], row["seed"])]
    return row[key] / stock[0]["score"] if stock and stock[0]["score"] else None


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


def mean_relative(rows: Results, results: Results, key: str = "score") -> float | None:
    """The mean over tasks of the relative score (over its seeds), for the tasks that the rows have."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = relative(row, results, key)
        if value is not None:
            by_task[row["task"]].append(value)
    return statistics.mean(statistics.mean(values) for values in by_task.values()) if by_task else None


def in_order(results: Results) -> dict[tuple[str, bool], Results]:
    """The lines: stock first, then those with transfer, in both the most complete and then the best first."""
    lines = group(results)

    def place(key: tuple[str, bool]) -> tuple:
        tasks = len({row["task"] for row in lines[key]})
        return key[0] != "stock", not key[1], -tasks, -(mean_relative(lines[key], results) or 0)

    return {key: lines[key] for key in sorted(lines, key=place)}


def share(rows: Results, results: Results) -> str:
    """The mean relative score, and over how many tasks it is, where that is not all of them."""
    value = mean_relative(rows, results)
    tasks = len({row["task"] for row in rows})
    if value is None:
        return ""
    return f"{value:.1%}" if tasks == len(TASKS) else f"{value:.1%} ({tasks} of {len(TASKS)} tasks)"


def name_of(variant: str, transfer: bool) -> str:
    if variant == "stock":
        return variant
    return f"`{variant}`" if transfer else f"`{variant}`, fresh logits"


def table(results: Results) -> str:
    """Everything. Scores in points of 100; the mean relative to stock over the tasks that the line has. Seconds are those
    of seed 0, as far as it ran on the machine that stock ran on.
    """
    head = ["attention", *TASKS.values(), "mean to stock", "before fine-tuning"]
    head += ["parameters", "transfer", "fine-tuning", "examples/s"]
    lines = []
    machines = {row["machine"] for row in results if row["variant"] == "stock" and row["seed"] == 0}
    for (variant, transfer), rows in in_order(results).items():
        timed = [row for row in rows if row["seed"] == 0 and row["machine"] in machines]

        def mean(key: str, unit: str = "", of: Results = timed) -> str:
            return f"{statistics.mean(row[key] for row in of):.0f}{unit}" if of else ""

        cells = [name_of(variant, transfer)]
        cells += [cell([row for row in rows if row["task"] == task]) for task in TASKS]
        taught = mean_relative(rows, results, "score_before_finetuning") if transfer else None
        cells += [share(rows, results), "" if taught is None else f"{taught:.1%}"]
        cells += [
            f"{max(row['parameters'] for row in rows) / 1e6:.1f} M",
            mean("transfer_seconds", " s") if transfer else "",
        ]
        lines.append([*cells, mean("train_seconds", " s"), mean("examples_per_second")])
    return markdown(head, lines) + "\n\n" + provenance(results)


def against_fresh(variant: str, results: Results) -> tuple[list[str], float, float]:
    """The tasks that both transfer and fresh logits have seed 0 of, and the mean relative scores of both there."""
    groups = [[r for r in group(results).get((variant, transfer), []) if r["seed"] == 0] for transfer in (True, False)]
    both = [task for task in TASKS if all(task in {row["task"] for row in rows} for rows in groups)]
    first, second = (mean_relative([row for row in rows if row["task"] in both], results) or 0.0 for rows in groups)
    return both, first, second


def starts(results: Results) -> str:
    """`random` with fresh logits, from both of its starts."""
    lines = []
    for variant, start in (("random", "default"), ("random-handcrafted", "handcrafted")):
        rows = group(results).get((variant, False), [])
        lines.append(
            [f'`init="{start}"`', *(cell([r for r in rows if r["task"] == task]) for task in ("sst2", "mrpc"))]
        )
    return markdown(["`random`, fresh logits", TASKS["sst2"], TASKS["mrpc"]], lines)


def probes() -> str:
    """What benchmarks/glue_probes.py measured: the mean over seeds, where there are several."""
    found: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    with PROBES.open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["task"], row["variant"], row["recipe"]].append(row)
    head = ["task", "variant", "recipe", "divergence", "error", "score", "of its teacher", "seconds"]
    lines = []
    for (task, variant, recipe), rows in found.items():

        def mean(key: str, digits: int = 3, of: list[dict[str, str]] = rows) -> str:
            return f"{statistics.mean(float(row[key]) for row in of):.{digits}f}"

        lines.append(
            [
                TASKS[task],
                f"`{variant}`",
                recipe,
                f"{mean('divergence_before')} → {mean('divergence_after')}",
                f"{mean('error_before')} → {mean('error_after')}",
                cell([{"score": float(row["score"])} for row in rows]),
                cell([{"score": float(rows[0]["teacher_score"])}]),
                mean("seconds", 0),
            ]
        )
    return markdown(head, lines)


def provenance(results: Results) -> str:
    """Where it was measured."""

    def of(read: Callable[[dict[str, Any]], Any], between: str = ", ") -> str:
        return between.join(sorted({str(read(row)) for row in results}))

    versions = "; ".join(
        f"{name} {of(lambda row, name=name: row['versions'][name])}" for name in ("torch", "transformers")
    )
    commits = len({row["commit"][:7] for row in results})
    return (
        f"{of(lambda row: row['model'])}; {of(lambda row: row['machine'], ' or ')}, {of(lambda row: row['threads'])} thread; "
        f"{versions}; seeds {of(lambda row: row['seed'])}; {commits} commits, named in the files."
    )


def plot(results: Results, path: Path) -> None:
    """With transfer: each variant's mean relative score, and its tasks as dots. Beside it, fresh logits on the same tasks."""
    lines = [(key[0], rows) for key, rows in reversed(in_order(results).items()) if key[1]]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.36 * len(lines) + 1.6), sharey=True, width_ratios=(3, 2))
    for place, (variant, rows) in enumerate(lines):
        axes[0].barh(place, 100 * (mean_relative(rows, results) or 0), color=PALE)
        for number, (task, name) in enumerate(TASKS.items()):
            share = mean_relative([row for row in rows if row["task"] == task], results)
            label = name if place == 0 else None
            axes[0].plot(
                [100 * share] if share else [],
                [place] if share else [],
                "osD^v"[number],
                color=COLOURS[number],
                label=label,
            )
        both, with_transfer, fresh = against_fresh(variant, results)
        if both:
            axes[1].barh(
                place + 0.2, 100 * with_transfer, 0.4, color=COLOURS[0], label="transfer" if place == 0 else None
            )
            axes[1].barh(place - 0.2, 100 * fresh, 0.4, color=PALE, label="fresh" if place == 0 else None)
    for axis, title in zip(axes, ("with transfer", "on the tasks with fresh logits too"), strict=True):
        axis.axvline(100, color="black", linewidth=1)
        axis.set_xlabel("score relative to stock, %")
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=7, loc="lower right")
    axes[0].set_yticks(range(len(lines)), [variant for variant, _ in lines])
    axes[0].set_xlim(55, 130)
    axes[1].set_xlim(80, 104)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Print the table, write tables and plot; or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document disagrees")
    arguments = parser.parse_args(argv)
    results = read(arguments.results)
    if not results:
        sys.exit(f"There are no results in {arguments.results}: run benchmarks/glue.py first.")
    makers = {"glue": lambda: table(results), "glue-starts": lambda: starts(results), "glue-probes": probes}
    write_tables(arguments.documents, "glue_table", makers, check=arguments.check)
    if not arguments.check:
        print(table(results))
        plot(results, arguments.results / "scores.png")


if __name__ == "__main__":
    main()
