"""The tables of the GLUE benchmark, from the files that `benchmarks/glue/scores.py` and `transfers.py` wrote."""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.report.table_text import markdown

RESULTS = ALL_RESULTS / "glue"
PROBES = ALL_RESULTS / "glue_probes.csv"
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
    """What benchmarks/glue/transfers.py measured: the mean over seeds, where there are several."""
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
