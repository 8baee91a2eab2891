#!/usr/bin/env python
"""The tables and plots of docs/tasks.md, from the files that benchmarks/paper.py and benchmarks/pretrained.py wrote.

    python benchmarks/paper_table.py            # writes the tables into the document, and draws the plots
    python benchmarks/paper_table.py --check    # only says whether document and results agree

`<!-- table: paper-clm (benchmarks/paper_table.py) -->` … `<!-- end of table -->` is where the table `paper-clm` goes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from paper import LONG, VARIANTS  # noqa: E402
from paper_plot import plot_kept, plot_orders  # noqa: E402
from pretrained import all_runs as pretrained_runs  # noqa: E402

from hf_synthesizer.plots import save  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "tasks.md"
PLACE = re.compile(
    r"(<!-- table: ([a-z0-9_-]+) \(benchmarks/paper_table\.py\) -->\n).*?(<!-- end of table -->)", re.DOTALL
)
STOCK = "dot_product"

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Literature:
    """Figures of the paper's own size, as surveys and follow-ups report them."""

    what: str
    higher_is_better: bool
    figures: dict[str, float]


SURVEYS = "as surveys of the paper report it"
NARANG = "Narang et al. 2021, T5-base"
LITERATURE = {
    "translation": Literature(
        f"WMT English–German, BLEU, {SURVEYS}",
        True,
        {
            "dot_product": 27.67,
            "fixed_random": 23.89,
            "random": 27.27,
            "dense": 27.43,
            "random+dense": 27.68,
            "random+dot_product": 28.47,
        },
    ),
    "clm": Literature(
        f"LM1B, perplexity, {SURVEYS}",
        False,
        {
            "dot_product": 38.21,
            "random": 40.60,
            "dense": 40.88,
            "factorized_random": 42.40,
            "dense+dot_product": 37.27,
            "random+dot_product": 40.05,
        },
    ),
    "mlm": Literature(
        f"C4, loss of masked spans, {NARANG}",
        False,
        {
            "dot_product": 1.838,
            "random": 2.009,
            "dense": 1.962,
            "factorized_random": 1.968,
            "random+dot_product": 1.842,
            "dense+dot_product": 1.840,
        },
    ),
    "summarization": Literature(
        f"XSum, {NARANG}",
        True,
        {
            "random": 10.35,
            "dense": 14.27,
            "factorized_random": 15.39,
            "random+dot_product": 17.04,
            "dense+dot_product": 16.96,
        },
    ),
}
LITERATURE |= {f"{task}_long": LITERATURE[task] for task in ("clm", "mlm", "translation")}
SCORES = {
    "clm": ("perplexity", False),
    "clm_long": ("perplexity", False),
    "translation": ("BLEU", True),
    "translation_long": ("BLEU", True),
    "mlm": ("perplexity", False),
    "mlm_long": ("perplexity", False),
    "summarization": ("ROUGE-L", True),
}


POINTS = {"fresh": "before", "closed": "closed form", "distance": "by distance", "transfer": "transfer"}
PRETRAINED = {
    "smollm2": ("Perplexity", True),
    "smollm2_long": ("Perplexity", True),
    "translation": ("BLEU", False),
    "summarization": ("ROUGE-L", False),
}
"""What is judged, and whether it is told relative to stock."""
TITLES = {
    "smollm2": "SmolLM2-135M, WikiText-2",
    "translation": "FLAN-T5-small, Multi30k",
    "summarization": "FLAN-T5-small, DialogSum",
}
"""What has a panel of the plot, and what stands over it."""
PRETRAINED_RUNS = Counter(run.task for run in pretrained_runs())


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
        return f"*Not run yet: `python benchmarks/paper.py --tasks {task}` makes it.*"
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


def of_pretrained(results: Results, task: str) -> Results:
    """The runs of one pretrained model and task, in the order of the table."""
    rows = [row for row in results if row["task"] == task]
    return sorted(rows, key=lambda row: (row["variant"], row["by"], row["share"]))


def pretrained(results: Results, task: str) -> str:
    """What a pretrained model keeps, by the share that is synthesized."""
    rows = of_pretrained(results, task)
    if not rows:
        return f"*Not run yet: `python benchmarks/pretrained.py --tasks {task}` makes it.*"
    points = {point: said for point, said in POINTS.items() if any(point in row["points"] for row in rows)}
    lines = ["| attention | share | chosen by | " + " | ".join(points.values()) + " | transfer took |"]
    lines.append("|---|---:|---|" + "---:|" * (len(points) + 1))
    name, relative = PRETRAINED[task]
    for row in rows:
        found = row["points"]
        cells = [f"`{row['variant']}`", f"{row['share']} %", row["by"]]
        for point in points:
            score = found[point]["score"] if point in found else None
            cells.append("" if score is None else f"{score / row['stock']:.2f} ×" if relative else f"{score:.2f}")
        lines.append("| " + " | ".join([*cells, f"{found['transfer']['seconds']:.0f} s"]) + " |")
    stock = (
        f"{name} relative to stock's {rows[0]['stock']:.1f}." if relative else f"{name}; stock {rows[0]['stock']:.2f}."
    )
    size, steps = rows[0]["size"], rows[0]["points"]["transfer"]["steps"]
    notes = (
        f"{stock} {size['test_rows']} rows of the test, at most {size['max_length']} tokens; the transfer is {steps} steps of "
        f"{size['batch_size']}."
    )
    missing = PRETRAINED_RUNS[task] - len(rows)
    if missing:
        notes = f"**{missing} of {PRETRAINED_RUNS[task]} have not been run yet.** {notes}"
    return "\n".join(lines) + f"\n\n{notes} {free(rows[0]['costs'])} {provenance(rows)}"


def free(costs: dict[str, list[float]]) -> str:
    """How costs are spread over heads and layers."""
    heads = sorted(cost for layer in costs.values() for cost in layer)
    shares = [sum(heads[: round(len(heads) * part)]) / sum(heads) for part in (0.25, 0.5, 0.9)]
    layers = sorted(costs, key=lambda layer: sum(costs[layer]))
    few = min(3, len(layers) // 2)
    cheap, dear = (", ".join(f"`{layer}`" for layer in some) for some in (layers[:few], layers[::-1][:few]))
    return (
        f"Of the summed costs of its {len(heads)} heads, the cheapest quarter has {shares[0]:.1%}, the cheapest half "
        f"{shares[1]:.1%}, the dearest tenth {1 - shares[2]:.0%}; cheapest layers: {cheap}; dearest: {dear}."
    )


def with_tables(text: str, folder: Path) -> str:
    """A document with its tables written anew."""
    paper = read(folder / "paper")
    makers: dict[str, Callable[[], str]] = {f"paper-{task}": lambda task=task: table(paper, task) for task in SCORES}
    kept = read(folder / "pretrained")
    makers |= {f"pretrained-{task}": lambda task=task: pretrained(kept, task) for task in PRETRAINED}
    return PLACE.sub(lambda place: f"{place[1]}\n{makers[place[2]]()}\n\n{place[3]}", text)


def draw(folder: Path) -> None:
    """A plot for each table that has results, beside them."""
    paper, kept = read(folder / "paper"), read(folder / "pretrained")
    for task, (name, _) in SCORES.items():
        runs = of_variants(paper, task)
        if runs:
            known = LITERATURE[task]
            scores = {variant: [row["score"] for row in rows] for variant, rows in runs.items()}
            save(plot_orders(scores, name, known.figures, known.what), folder / "paper" / f"{task}.png", dpi=90)
    if kept:
        panels = {task: of_pretrained(kept, task) for task in TITLES if of_pretrained(kept, task)}
        labels = {task: PRETRAINED[task][0] for task in panels}
        save(
            plot_kept(panels, TITLES, labels, {point: said for point, said in POINTS.items() if point != "distance"}),
            folder / "pretrained" / "kept.png",
            dpi=90,
        )


def main(argv: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the document disagrees")
    arguments = parser.parse_args(argv)
    text = arguments.document.read_text(encoding="utf-8")
    written = with_tables(text, arguments.results)
    if arguments.check and written != text:
        sys.exit(f"{arguments.document.name} and the results disagree: run python benchmarks/paper_table.py.")
    arguments.document.write_text(written, encoding="utf-8")
    if not arguments.check:
        draw(arguments.results)


if __name__ == "__main__":
    main()
