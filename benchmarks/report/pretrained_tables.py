"""The tables of `benchmarks/pretrained/scores.py`: what a pretrained model keeps, by the share that is synthesized."""

from __future__ import annotations

from collections import Counter

from benchmarks.pretrained.scores import all_runs
from benchmarks.report.paper_tables import Results, provenance

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
PRETRAINED_RUNS = Counter(run.task for run in all_runs())


def of_task(results: Results, task: str) -> Results:
    """The runs of one pretrained model and task, in the order of the table."""
    rows = [row for row in results if row["task"] == task]
    return sorted(rows, key=lambda row: (row["variant"], row["by"], row["share"]))


def table(results: Results, task: str) -> str:
    """What a pretrained model keeps, by the share that is synthesized."""
    rows = of_task(results, task)
    if not rows:
        return f"*Not run yet: `python -m benchmarks.pretrained.scores --tasks {task}` makes it.*"
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
