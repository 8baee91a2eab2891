"""The plots of the benchmark of heads: the score against the share that is synthesized, and against the cache."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report.heads_tables import LINES, POINTS, PUBLISHED, SHARES, TASKS, Results, by_task, cache_share
from hf_synthesizer.pictures.figures import COLOURS, LEGEND_LINE

KEPT_LINES = (
    ("random+salience", "epoch", COLOURS[4], "-"),
    ("dense+salience", "closed", COLOURS[2], "--"),
    ("random+salience", "closed", COLOURS[4], "--"),
    ("random", "closed", COLOURS[0], "--"),
)
"""What `plot_kept` draws: variant, point, colour and style."""


def plot(results: Results, path: Path) -> None:
    """Quality against the share of synthesized heads, on the mean of all tasks; the published points are drawn as such."""
    titles = {
        "closed": "closed form alone: nothing was trained",
        "finetuned": "after transfer and 1,024 rows of fine-tuning",
        "epoch": "after transfer and an epoch of fine-tuning",
    }
    points = [point for point in titles if any(row["share"] and point in row["points"] for row in results)]
    figure = Figure((1.5 + 4.2 * len(points), 3.8), layout="constrained")
    axes = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
    colours = {"random": COLOURS[0], "random+salience": COLOURS[4], "dense+salience": COLOURS[2]}
    for point, axis in zip(points, axes, strict=True):
        for variant, by in LINES:
            drawn = {share: by_task(results, variant, by, share, point) for share in SHARES}
            shares = [share for share, found in drawn.items() if len(found) == len(TASKS)]
            if not shares:
                continue
            means = [100 * statistics.mean(map(statistics.mean, drawn[share].values())) for share in shares]
            label = f"{variant}{', whole layers' if by == 'layers' else ''}"
            style = "--" if by == "layers" else "-"
            axis.plot(
                [0, *shares], [100, *means], style, color=colours[variant], marker="o", markersize=4, label=label
            )
        axis.plot(*zip(*PUBLISHED.items(), strict=True), "*", color="black", markersize=10, fillstyle="none",
                  label="PAPA's own, published: other models, six tasks;\n“nearly nothing” at 50 %, −8 % at 100 %")  # fmt: skip
        axis.axhline(100, color="black", linewidth=1)
        axis.set_title(titles[point], fontsize=10)
        axis.set_xlabel("heads that compare no tokens, %")
        axis.set_xticks([0, *SHARES])
        axis.tick_params(axis="x", labelsize=7)  # 90, 95 and 100 are near each other
        axis.set_ylim(60, 107)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower left", handlelength=LEGEND_LINE)
    axes[0].set_ylabel("score, % of stock's (below 60 not drawn)")
    figure.savefig(path, dpi=130)


def plot_kept(results: Results, path: Path) -> None:
    """Quality against the cache of a decoder of this shape, on the mean of all tasks; a point for each share of heads."""
    figure = Figure((7.5, 3.8), layout="constrained")
    axis = figure.subplots()
    caches = {share: cache_share(results, share) for share in SHARES}
    for variant, point, colour, style in KEPT_LINES:
        drawn = {share: by_task(results, variant, "heads", share, point) for share in SHARES}
        shares = [share for share, found in drawn.items() if len(found) == len(TASKS) and caches[share] is not None]
        means = [100 * statistics.mean(map(statistics.mean, drawn[share].values())) for share in shares]
        widths = [100 * (caches[share] or 0.0) for share in shares]
        label = f"{variant}, {POINTS[point]}"
        axis.plot([100, *widths], [100, *means], style, color=colour, marker="o", markersize=4, label=label)
    for share in (25, 50, 75, 90):
        if (width := caches[share]) is not None:
            axis.annotate(f"{share} % of heads\nsynthesized", (100 * width, 104), ha="center", va="bottom", fontsize=7)
            axis.axvline(100 * width, color="grey", linewidth=0.5)
    axis.axhline(100, color="black", linewidth=1)
    axis.annotate("stock", (100, 101), ha="center", va="bottom", fontsize=8)
    axis.set_xlim(102, 50)
    axis.set_ylim(60, 108)
    axis.set_xlabel("cache of a decoder of this shape, % of stock's (smaller to the right)")
    axis.set_ylabel("score, % of stock's")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower left", handlelength=LEGEND_LINE)
    figure.savefig(path, dpi=130)
