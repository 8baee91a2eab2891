"""The tables of `benchmarks/paper/`: variants trained from scratch, beside the literature."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.paper.scores import LONG, VARIANTS
from benchmarks.report.literature import LITERATURE

STOCK = "dot_product"
SCORES = {
    "clm": ("perplexity", False),
    "clm_long": ("perplexity", False),
    "translation": ("BLEU", True),
    "translation_long": ("BLEU", True),
    "mlm": ("perplexity", False),
    "mlm_long": ("perplexity", False),
    "summarization": ("ROUGE-L", True),
}

Results = list[dict[str, Any]]


def read(folder: Path) -> Results:
    """All results of a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def of_variants(results: Results, task: str) -> dict[str, Results]:
    """The runs of each variant, the best mean first."""
    found: dict[str, Results] = {}
    for row in results:
        if row["task"] == task:
            found.setdefault(row["variant"], []).append(row)
    sign = -1 if SCORES[task][1] else 1
    return dict(sorted(found.items(), key=lambda item: sign * mean(item[1])))


def mean(rows: Results, key: str = "score") -> float:
    return statistics.mean(row[key] for row in rows)


def table(results: Results, task: str) -> str:
    """Each variant's score over its seeds, beside stock of the same seeds and the literature's figure."""
    runs, known = of_variants(results, task), LITERATURE[task]
    if not runs:
        return f"*Not run yet: `python -m benchmarks.paper.scores --tasks {task}` makes it.*"
    name = SCORES[task][0]
    converted = any("before_finetuning" in row for rows in runs.values() for row in rows)
    head = ["attention", *["converted"] * converted, name, "to dot product", "parameters", "training", "literature"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for variant, rows in runs.items():
        spread = f" ± {statistics.stdev(row['score'] for row in rows):.2f}" if len(rows) > 1 else ""
        figure = known.figures.get(variant)
        before = (
            [f"{statistics.mean(row['before_finetuning'][row['score_name']] for row in rows):.2f}"]
            if converted
            else []
        )
        cells = [f"`{variant}`", *before, f"{mean(rows):.2f}{spread}", against(rows, runs.get(STOCK, []), task)]
        cells += [f"{max(row['parameters'] for row in rows) / 1e6:.2f} M", f"{mean(rows, 'train_seconds'):.0f} s"]
        lines.append("| " + " | ".join([*cells, "" if figure is None else f"{figure:g}"]) + " |")
    variants = LONG.get(task, VARIANTS)
    missing = len(set(variants) - set(runs))
    notes = [
        f"Literature: {known.what}.",
        order(runs, task),
        budget(next(iter(runs.values()))[0]),
        provenance([row for rows in runs.values() for row in rows]),
    ]
    if missing:
        notes.insert(0, f"**{missing} of {len(variants)} kinds of attention have not been run yet.**")
    return "\n".join(lines) + "\n\n" + " ".join(notes)


def against(rows: Results, stock: Results, task: str) -> str:
    """The mean difference to stock on the same seeds: points of BLEU and ROUGE, percent of a perplexity."""
    there = {row["seed"]: row["score"] for row in stock}
    shared = [row for row in rows if row["seed"] in there]
    if not shared:
        return ""
    if SCORES[task][1]:
        return f"{statistics.mean(row['score'] - there[row['seed']] for row in shared):+.2f}"
    return f"{statistics.mean(row['score'] / there[row['seed']] - 1 for row in shared):+.1%}"


def order(runs: dict[str, Results], task: str) -> str:
    """In which order variants come there and here, and where the two disagree."""
    known = LITERATURE[task]
    both = [variant for variant in runs if variant in known.figures]
    if len(both) < 3:
        return "Too few variants are in both to compare their order."
    sign = -1 if known.higher_is_better else 1
    there = sorted(both, key=lambda variant: sign * known.figures[variant])
    ranks = [[names.index(variant) for variant in both] for names in (both, there)]
    swapped = [
        f"`{first}` before `{second}`"
        for place, first in enumerate(both)
        for second in both[place + 1 :]
        if there.index(first) > there.index(second)
    ]
    says = f"Here the other way round: {', '.join(swapped)}." if swapped else "No pair is the other way round."
    return (
        f"Best first, there: {', '.join(f'`{name}`' for name in there)}; here: {', '.join(f'`{name}`' for name in both)}. "
        f"Rank correlation (Spearman) over these {len(both)}: {spearmanr(*ranks).statistic:.2f}. {says}"
    )


def budget(row: dict[str, Any]) -> str:
    """How much every variant was trained and judged on."""
    size = row["size"]
    scratch = "" if "before_finetuning" in row else (
        f"Width {size['width']}, {size['layers']} layers, {size['heads']} heads, {size['vocabulary']} byte pairs. "
    )  # fmt: skip
    return (
        f"{scratch}{row['train_rows']} rows of at most {size['max_length']} tokens, {row['train_steps']} steps of "
        f"{size['batch_size']}, rate {size['learning_rate']:g}; judged on the first {size['test_rows']} rows of the test."
    )


def provenance(results: Results) -> str:
    """Where it was measured."""

    def of(value: Callable[[dict[str, Any]], Any]) -> str:
        return ", ".join(sorted({str(value(row)) for row in results}))

    versions = "; ".join(
        f"{name} {of(lambda row, name=name: row['versions'][name])}" for name in ("torch", "transformers")
    )
    commits = of(lambda row: row["commit"][:10])
    return f"{of(lambda row: row['machine'])}, {of(lambda row: row['threads'])} thread; {versions}; seeds {of(lambda row: row['seed'])}; commit {commits}."
