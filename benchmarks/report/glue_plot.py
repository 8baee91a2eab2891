"""The plot of the GLUE benchmark."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.report.glue_tables import TASKS, Results, against_fresh, in_order, mean_relative
from hf_synthesizer.pictures.figures import COLOURS

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

PALE = "#c9d6df"


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
