"""The tables of the benchmark of heads, from the files that `benchmarks/heads/curve.py` and `benchmarks/block/attention.py` wrote.

A score is relative to stock's of the same task and seed: before fine-tuning to the stock model that was converted, and after it to
the same stock model after the same fine-tuning.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.report.table_text import markdown

RESULTS = ALL_RESULTS / "heads"
SPEED = ALL_RESULTS / "heads_speed"
TASKS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}
SHARES = (25, 50, 75, 90, 95, 100)
LAYER_SHARES = (25, 50, 75)
"""Of six layers, 90 % are all."""
WANTED = {50: 0.995, 75: 0.99, 90: 0.98, 95: 0.97}
"""What was asked for before anything was measured: of stock's score, on the mean of the five tasks."""
WANTED_OF_STSB = {90: 0.96}
POINTS = {
    "closed": "closed form alone",
    "transfer": "after transfer",
    "finetuned": "fine-tuned on 1,024 rows",
    "epoch": "fine-tuned for an epoch",
}
TRAINED = ("finetuned", "epoch")
"""Points that are compared with stock after the same fine-tuning."""
EPOCH_LINE, EPOCH_SHARES = ("random+salience", "heads"), (50, 75, 90, 95, 100)
"""What was fine-tuned for an epoch."""
LINES = (("random", "heads"), ("random+salience", "heads"), ("dense+salience", "heads"), ("random+salience", "layers"))
PUBLISHED = {50: 100.0, 100: 92.0}
"""PAPA (Hassid et al. 2022), other models and tasks: with half of all heads constant nearly nothing is lost (no figure is given
here, so it is drawn at 100 %), and with all of them 8 % on the mean of six tasks."""

KEPT = (
    ("random", "heads", "closed"),
    ("random+salience", "heads", "closed"),
    ("dense+salience", "heads", "closed"),
    ("random+salience", "heads", "epoch"),
    ("random+salience", "layers", "closed"),
)
"""What the README shows of it."""

Results = list[dict[str, Any]]


def read(folder: Path, names: str = "*-seed*.json") -> Results:
    """All results."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(names))]


def relative(row: dict[str, Any], point: str, results: Results) -> float | None:
    """A point's score as a share of stock's on the same task and seed, as often and on as many rows fine-tuned."""
    stock = [r for r in results if r["share"] == 0 and (r["task"], r["seed"]) == (row["task"], row["seed"])]
    other = stock[0]["points"].get(point if point in TRAINED else "closed") if stock else None
    own = row["points"].get(point)
    return own["score"] / other["score"] if own and other else None


def by_task(results: Results, variant: str, by: str, share: int, point: str) -> dict[str, list[float]]:
    """The relative scores of each task's seeds."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in results:
        if (row["variant"], row["by"], row["share"]) == (variant, by, share):
            value = relative(row, point, results)
            if value is not None:
                found[row["task"]].append(value)
    return {task: found[task] for task in TASKS if task in found}


def seeds_cell(values: list[float]) -> str:
    """A share, with the standard deviation where there are several seeds."""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1%}{spread}" if values else ""


def mean_cell(tasks: dict[str, list[float]]) -> str:
    """The mean over the tasks, and which these are, where some are missing."""
    if not tasks:
        return ""
    value = statistics.mean(statistics.mean(values) for values in tasks.values())
    return f"{value:.1%}" + ("" if len(tasks) == len(TASKS) else f" ({', '.join(TASKS[task] for task in tasks)})")


def curve(results: Results, chosen: tuple[tuple[str, str, str], ...] | None = None) -> str:
    """What is kept, on the mean of the tasks that there are: a line a share, a column a variant (the chosen ones), before and after
    training, where some share has all tasks."""
    every = tuple((variant, by, point) for variant, by in LINES for point in ("closed", *TRAINED))
    columns = [
        (f"{title(variant, by)}, {POINTS[point]}", variant, by, point)
        for variant, by, point in chosen or every
        if any(len(by_task(results, variant, by, share, point)) == len(TASKS) for share in SHARES)
    ]
    lines = []
    for share in SHARES:
        cells = [mean_cell(by_task(results, variant, by, share, point)) for _, variant, by, point in columns]
        if any(cells):
            lines.append([f"{share} %", *cells, cache(results, share)])
    return markdown(["heads synthesized", *(name for name, *_ in columns), "cache, to stock"], lines)


def title(variant: str, by: str) -> str:
    return f"`{variant}`" + (", whole layers" if by == "layers" else "")


def bars(results: Results) -> str:
    """What was asked for, and what was found: a line a bar, and by how much it is missed."""
    columns = [(variant, point) for variant, by in LINES if by == "heads" for point in POINTS]
    asked = [("five tasks", tuple(TASKS), share, bar) for share, bar in WANTED.items()]
    asked += [("STS-B", ("stsb",), share, bar) for share, bar in WANTED_OF_STSB.items()]
    asked += [("all but CoLA", tuple(task for task in TASKS if task != "cola"), share, None) for share in WANTED]
    lines = []
    for name, tasks, share, bar in asked:
        cells = []
        for variant, point in columns:
            found = by_task(results, variant, "heads", share, point)
            complete = all(task in found for task in tasks)
            value = statistics.mean(statistics.mean(found[task]) for task in tasks) if complete else None
            missed = "" if value is None or bar is None or round(value, 3) >= bar else f" (−{100 * (bar - value):.1f})"
            cells.append("" if value is None else f"{value:.1%}{missed}")
        lines.append([f"{share} %, {name}", "" if bar is None else f"{bar:.1%}", *cells])
    used = [number for number in range(len(columns)) if any(line[2 + number] for line in lines)]
    head = [f"{title(variant, 'heads')}, {POINTS[point]}" for variant, point in (columns[number] for number in used)]
    return markdown(
        ["heads", "asked for", *head], [[*line[:2], *(line[2 + number] for number in used)] for line in lines]
    )


def cache(results: Results, share: int) -> str:
    """The cache of a decoder as a cell of a table."""
    measured = cache_share(results, share)
    return "" if measured is None else f"{measured:.2f}"


def cache_share(results: Results, share: int) -> float | None:
    """The cache that a decoder of this shape needs with the heads that were chosen for `random`, relative to stock."""
    found = [r["cache_share"] for r in results if (r["variant"], r["by"], r["share"]) == ("random", "heads", share)]
    return statistics.mean(found) if found else None


def tasks(results: Results) -> str:
    """Every task: the share of stock's score that is kept, with ± where there are several seeds."""
    lines = []
    for variant, by in LINES:
        for point, name in POINTS.items():
            for share in SHARES:
                found = by_task(results, variant, by, share, point)
                if found:
                    cells = [seeds_cell(found.get(task, [])) for task in TASKS]
                    lines.append([title(variant, by), name, f"{share} %", *cells])
    return markdown(["attention", "point", "heads", *TASKS.values()], lines) + "\n\n" + provenance(results)


def stock(results: Results) -> str:
    """The scores that all others are relative to."""
    lines = []
    for point, name in (("closed", "as it was converted"), *((point, POINTS[point]) for point in TRAINED)):
        cells = []
        for task in TASKS:
            rows = [r for r in results if r["share"] == 0 and r["task"] == task and point in r["points"]]
            cells.append(f"{statistics.mean(100 * r['points'][point]['score'] for r in rows):.1f}" if rows else "")
        lines.append([name, *cells])
    return markdown(["stock", *TASKS.values()], lines)


def missing(results: Results) -> str:
    """Which runs of the curve are not there."""
    there = {(row["task"], row["variant"], row["by"], row["share"], row["seed"], point)
             for row in results for point in row["points"]}  # fmt: skip
    lines = []
    for point, name in POINTS.items():
        for variant, by in LINES:
            cells = []
            for task in TASKS:
                needed = SHARES if by == "heads" else LAYER_SHARES
                if point == "epoch":
                    needed = EPOCH_SHARES if (variant, by) == EPOCH_LINE else ()
                shares = [share for share in needed if (task, variant, by, share, 0, point) not in there]
                cells.append(", ".join(map(str, shares)) or "none")
            if any(cell != "none" for cell in cells):
                lines.append([title(variant, by), name, *cells])
    return markdown(["not measured yet", "point", *TASKS.values()], lines) if lines else "*Seed 0 is complete.*"


def provenance(results: Results) -> str:
    """Where it was measured."""

    def of(*keys: str) -> str:
        values = set()
        for row in results:
            value: Any = row
            for key in keys:
                value = value[key]
            values.add(str(value))
        return ", ".join(sorted(values))

    return (
        f"{of('model')}; {of('machine')}, {of('threads')} thread; torch {of('versions', 'torch')}; transformers "
        f"{of('versions', 'transformers')}; seeds {of('seed')}; commits {of('commit')}."
    )


def speed(folder: Path) -> str:
    """One attention block, relative to stock through the same library: the median over fresh processes, with their range, where there
    are several."""
    found: dict[tuple[str, str, str], dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows.append(row)
                found[row["mode"], row["length"], row["batch_size"]][row["variant"]].append(row)
    lines = []
    for (mode, length, size), variants in sorted(found.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        whole = [float(row["median_ms"]) for row in variants["random"]]
        cells = [mode, length, size, str(len(whole))]
        for name in ("random", "random [50% of heads]", "random [90% of heads]"):
            cells.append(spread([float(row["same_library_speedup"]) for row in variants[name]]))
        some = [float(row["median_ms"]) for row in variants["random [90% of heads]"]]
        cells.append(spread([all_ms / own for all_ms, own in zip(whole, some, strict=True)]))
        lines.append(cells)
    head = ["", "tokens", "rows", "processes", "all heads, to stock", "50 %, to stock", "90 %, to stock"]
    where = {f"{row['cpu']}, {row['threads']} threads, torch {row['torch']}, commit {row['commit']}" for row in rows}
    return markdown([*head, "90 %, to all heads"], lines) + "\n\n" + "; ".join(sorted(where)) + "."


def spread(values: list[float]) -> str:
    """The median, and the range of several."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}–{max(values):.2f})"
