"""The tables of `benchmarks/heads/by_distance.py` and `benchmarks/pretrained/decoder_plans.py`: what logits by distance and windows keep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.heads.by_distance import CONTROLS, DISTANCES, PLACES, SHARES, SHORT
from benchmarks.measurements.records import RESULTS
from benchmarks.pretrained.decoder_plans import PLANS, POINTS
from benchmarks.report.heads_tables import TASKS, Results, read, seeds_cell
from benchmarks.report.table_text import markdown

ENCODERS, DECODERS = RESULTS / "by_distance", RESULTS / "decoder_plans"
CONTROL_NAMES = {"own_token": "the same heads, their own token alone", "zeroed": "the same heads zeroed"}
PLAN_NAMES = {
    "stock": "stock",
    "quarter": "1/4 of the heads see all tokens",
    "tenth": "1/10 see all tokens",
    "none": "none sees all tokens",
}
POINT_NAMES = {
    "closed": "no training",
    "taught": "after a transfer",
    "own_token": "heads cut to their own token",
    "zeroed": "heads zeroed",
}
NOT_YET = "Not measured yet: `python -m {}`."


def encoders() -> str:
    """What each variant keeps on each task, relative to stock, on all rows and on longer ones."""
    results = read(ENCODERS)
    if not results:
        return NOT_YET.format("benchmarks.heads.by_distance --glue_dir GLUE")
    lines = []
    for share in SHARES:
        for variant in (PLACES, DISTANCES):
            for short in (False, True):
                rows = f"≤ {SHORT} tokens" if short else "all"
                lines.append([f"`{variant}`", f"{share} %", rows, *_cells(results, variant, share, short)])
        for control in CONTROLS:
            lines.append([CONTROL_NAMES[control], f"{share} %", "", *_cells(results, control, share, False)])
    long_tasks = [task for task in TASKS if _ratios(results, task, DISTANCES, SHARES[0], False, "score_long")]
    head = ["attention", "heads", "taught on", *TASKS.values(), "mean"]
    head += [f"{TASKS[task]}, rows of more than {SHORT} tokens" for task in long_tasks]
    return markdown(head, lines) + "\n\n" + _where(results)


def _cells(results: Results, variant: str, share: int, short: bool) -> list[str]:
    by_task = {task: _ratios(results, task, variant, share, short, "score") for task in TASKS}
    complete = all(by_task.values())
    mean = f"{statistics.mean(map(statistics.mean, by_task.values())):.1%}" if complete else ""
    long_tasks = [task for task in TASKS if _ratios(results, task, DISTANCES, SHARES[0], False, "score_long")]
    long = [seeds_cell(_ratios(results, task, variant, share, short, "score_long")) for task in long_tasks]
    return [*map(seeds_cell, by_task.values()), mean, *long]


def _ratios(results: Results, task: str, variant: str, share: int, short: bool, score: str) -> list[float]:
    """A score relative to stock's of the same seed, for each seed."""
    of_task = [row for row in results if row["task"] == task]
    stock = {row["seed"]: row[score] for row in of_task if row["share"] == 0}
    return [
        row[score] / stock[row["seed"]]
        for row in of_task
        if (row["variant"], row["share"], row["short"]) == (variant, share, short)
        and row[score] is not None
        and stock.get(row["seed"])
    ]


def decoders() -> str:
    """Perplexity relative to stock, what is written, and the cache, for each plan and point."""
    results = {(row["plan"], row["point"]): row for row in read(DECODERS, "*.json")}
    if ("stock", "closed") not in results:
        return NOT_YET.format("benchmarks.pretrained.decoder_plans --weights WEIGHTS")
    stock, lines = results["stock", "closed"]["metrics"], []
    for plan in PLANS:
        for point in POINTS:
            if (plan, point) not in results:
                continue
            row = results[plan, point]
            found = row["metrics"]
            lines.append(
                [
                    PLAN_NAMES[plan],
                    "" if plan == "stock" else POINT_NAMES[point],
                    f"{found['perplexity'] / stock['perplexity']:.2f} ×",
                    f"{found['continuation_perplexity'] / stock['continuation_perplexity']:.2f} ×",
                    f"{found['repeated']:.1%}",
                    f"{found['passkeys_found']:.0%}",
                    f"{found['cache_share']:.2f}",
                    f"{row['tokens']:,}" if row.get("steps") else "",
                ]
            )
    head = ["plan", "", "perplexity", "of its own continuations under stock", "repeated 4-grams", "passkeys found"]
    text = markdown([*head, "cache at 8,192 tokens", "tokens of the transfer"], lines)
    rows = list(results.values())
    return (
        f"{text}\n\nStock's perplexity is {stock['perplexity']:.1f}, and {stock['continuation_perplexity']:.1f} on its own "
        f"continuations. {_spread(row['windows'] for row in rows)} windows of the test, "
        f"{_spread(row['metrics']['continuations'] for row in rows)} continuations, {_spread(row['metrics']['passkeys'] for row in rows)} "
        f"passkeys. {_where(rows)}"
    )


def _spread(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in sorted(set(numbers)))


def _where(results: list[dict[str, Any]]) -> str:
    """Where it was measured."""

    def of(*names: str) -> str:
        found = set()
        for row in results:
            value: Any = row
            for name in names:
                value = value[name]
            found.add(str(value)[:10] if names == ("commit",) else str(value))
        return ", ".join(sorted(found))

    return (
        f"{of('machine')}, {of('threads')} threads; torch {of('versions', 'torch')}; transformers "
        f"{of('versions', 'transformers')}; commit {of('commit')}; {of('date')}."
    )
