"""`plot_synthesizer`: what synthesized layers have learnt, whatever the input."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from ..errors import NotPatchedError
from .figures import CELL, chosen, draw_map, label_scale
from .tables import Table, tables_of

MOST_LAYERS, MOST_HEADS = 6, 4


def plot_synthesizer(
    model: PreTrainedModel, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """R, R1·R2ᵀ, W2 with b2, WA and WB, or the salience, a row for each table of a layer, a column for each head.

    Orange is below 0 and purple above; every map has a scale of its own, whose end is the number over it.

    Args:
        model: a patched model.
        layers: which of those that have tables; six of them if None.
        heads: which; four of them if None.

    Raises:
        NotPatchedError: for a model whose layers hold no such table.
        InvalidConfigError: for a layer or a head that there is not.
    """
    tables = tables_of(model)
    labels = list(dict.fromkeys(table.layer for table in tables))
    if not labels:
        raise NotPatchedError(
            f"This {type(model).__name__} has no layer with a learnt table: it is stock, or its variants only compare tokens."
        )
    wanted = [labels[index] for index in chosen(layers, len(labels), MOST_LAYERS, "layer with a table")]
    shown = [table for table in tables if table.layer in wanted]
    count = max(len(table.values) for table in shown)
    columns = chosen(heads, count, MOST_HEADS, "head")
    heights = [0.3 if table.values.shape[-2] == 1 else 0.6 if _is_wide(table) else 1.0 for table in shown]
    figure = Figure((CELL * 1.4 * len(columns) + 1.6, CELL * 1.25 * sum(heights) + 0.8), layout="constrained")
    grid = figure.add_gridspec(len(shown), len(columns), height_ratios=heights)
    for place, table in enumerate(shown):
        spans = [slice(None)] if _is_wide(table) else [slice(c, c + 1) for c in range(len(columns))]
        for column, span in enumerate(spans):
            if column and len(table.values) == 1:
                continue  # one table for all heads
            axis = figure.add_subplot(grid[place, span])
            head = 0 if len(table.values) == 1 else columns[column]
            draw_map(axis, table.values[head], signed=True, aspect="auto")
            label_scale(axis, float(table.values[head].abs().max()), signed=True)
            axis.set_xlabel(table.columns, fontsize=7)
            if table.values.shape[-2] == 1:
                axis.set_yticks([])
            if column == 0:
                axis.set_ylabel(f"{table.layer}\n{table.part}: {table.symbol}\n{table.rows}", fontsize=7)
            if len(table.values) > 1:
                axis.set_title(f"head {head}", fontsize=8)
            elif not _is_wide(table):
                axis.set_title("all heads", fontsize=8)
    figure.suptitle("orange below 0, purple above; the number over a map is the end of its scale", fontsize=8)
    return figure


def _is_wide(table: Table) -> bool:
    """Whether one map shows all heads, as rows."""
    return table.rows == "head"
