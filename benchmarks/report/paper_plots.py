"""The plots of the paper's tasks and of pretrained models: orders of variants here and in the literature, and what a pretrained model keeps."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hf_synthesizer.pictures.figures import COLOURS, LEGEND_LINE, QUIET, STOCK

DOT_PRODUCT = "dot_product"
SHAPES = "os^"
STYLES = {"fresh": ":", "closed": "--", "transfer": "-"}


def plot_orders(scores: dict[str, list[float]], name: str, figures: dict[str, float], what: str) -> Figure:
    """A line for each variant, the best on top: every seed and their mean, and beside it the literature's figure.

    Args:
        scores: of each variant those of its seeds, the best variant first.
        name: of the score.
        figures: the literature's.
        what: those are.
    """
    variants = list(scores)[::-1]
    figure = Figure((8.0, 0.28 * len(variants) + 1.1), layout="constrained")
    here, there = figure.subplots(1, 2, sharey=True)
    means = {variant: statistics.mean(found) for variant, found in scores.items()}
    for place, variant in enumerate(variants):
        colour = STOCK if variant == DOT_PRODUCT else COLOURS[0]
        here.plot(scores[variant], [place] * len(scores[variant]), "|", color=colour, markersize=9)
        here.plot(means[variant], place, "o", color=colour, markersize=6)
        if variant in figures:
            there.plot(
                figures[variant], place, "D", color=STOCK if variant == DOT_PRODUCT else COLOURS[4], markersize=6
            )
    for axis, found, label in ((here, means, f"{name}, here"), (there, figures, what)):
        if DOT_PRODUCT in found:
            axis.axvline(found[DOT_PRODUCT], color=QUIET, linewidth=1, linestyle="--")
        axis.set_xlabel(label.replace(", as ", "\nas "), fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.tick_params(labelsize=8)
    here.set_yticks(range(len(variants)), variants)
    return figure


def plot_kept(
    panels: dict[str, list[dict[str, Any]]], titles: dict[str, str], labels: dict[str, str], points: dict[str, str]
) -> Figure:
    """A panel for each task: the score against the share that is synthesized, at each point.

    Args:
        panels: of each task its results.
        titles: of the tasks.
        labels: what the score of each task is called.
        points: which are drawn, and what they are called.
    """
    figure = Figure((max(8.0, 1.0 + 3.6 * len(panels)), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    lines = sorted({(row["variant"], row["by"]) for rows in panels.values() for row in rows})
    for axis, (task, rows) in zip(axes, panels.items(), strict=True):
        stock = rows[0]["stock"]
        for number, line in enumerate(lines):
            own = [row for row in rows if (row["variant"], row["by"]) == line]
            for point in points:
                if own:
                    shares = [0, *(row["share"] for row in own)]
                    values = [stock, *(row["points"][point]["score"] for row in own)]
                    axis.plot(
                        shares, values, STYLES[point], color=COLOURS[number], marker=SHAPES[number], markersize=4
                    )
        axis.axhline(stock, color=STOCK, linewidth=1)
        if labels[task] == "Perplexity":
            axis.set_yscale("log")
            for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                ticks("{x:g}")
        axis.set_title(titles[task], fontsize=10)
        axis.set_ylabel(labels[task])
        axis.set_xlabel("synthesized, %")
        axis.set_xticks([0, 25, 50])
        axis.grid(alpha=0.3)
    keys = [
        *(
            Line2D([], [], color=COLOURS[number], marker=SHAPES[number], linestyle="none", label=", ".join(line))
            for number, line in enumerate(lines)
        ),
        *(Line2D([], [], color=QUIET, linestyle=STYLES[point], label=said) for point, said in points.items()),
        Line2D([], [], color=STOCK, linewidth=1, label="stock"),
    ]
    figure.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=len(keys), handlelength=LEGEND_LINE)
    return figure
