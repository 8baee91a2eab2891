"""What `suggest_heads` measured: a map of layers × heads, and the curve of its budgets."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..transfer import HeadSuggestion
from .figures import COLOURS, draw_map

CELL = 0.3
"""Inches of a head in the map."""


def plot_heads(suggestion: HeadSuggestion) -> Figure:
    """The root of each head's cost, layers × heads, with a dot on heads that are synthesized; beside it, what the swaps of each
    measured budget do to the answers together.
    """
    rows, columns = len(suggestion.costs), max(map(len, suggestion.costs.values()))
    panels = 2 if suggestion.curve else 1
    figure = Figure((CELL * columns + 2.2 + 3.6 * (panels - 1), max(CELL * rows + 1.4, 2.6)), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, width_ratios=[CELL * columns + 2.2, 3.6][:panels])[0]
    values = torch.full((rows, columns), torch.nan)  # a head that a layer does not have stays white
    for row, costs in enumerate(suggestion.costs.values()):
        values[row, : len(costs)] = torch.tensor(costs).clamp(min=0).sqrt()
    image = draw_map(axes[0], values, top=float(values.nan_to_num().max()))
    dots = [(head, row) for row, layer in enumerate(suggestion.costs) for head in suggestion.heads.get(layer, [])]
    if dots:
        axes[0].plot(*zip(*dots, strict=True), ".", color=COLOURS[4], markersize=6, label="synthesized")
        axes[0].legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes[0].set_yticks(range(rows), [str(layer) for layer in suggestion.costs], fontsize=7)
    axes[0].set_xlabel("head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0], label="√ cost of swapping this head alone", shrink=0.9)
    if suggestion.curve:
        points = sorted(suggestion.curve.items())
        shares, changes = zip(*((count / suggestion.num_heads, change) for count, change in points), strict=True)
        axes[1].plot(shares, changes, "o-", color=COLOURS[0], markersize=4)
        axes[1].set_yscale("log")
        axes[1].yaxis.set_minor_formatter("{x:g}")
        axes[1].yaxis.set_major_formatter("{x:g}")
        axes[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[1].set_xlabel("heads synthesized together")
        axes[1].set_ylabel("squared change of\nthe answers, relative")
        axes[1].grid(alpha=0.3)
    return figure
