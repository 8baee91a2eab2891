"""`plot_synthesizer`: the learnt tables of synthesized layers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from ..errors import NotPatchedError
from .figures import CELL, choose_indices, draw_map, label_scale
from .tables import tables_of

MOST_LAYERS, MOST_HEADS = 6, 4


def plot_synthesizer(
    model: PreTrainedModel, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """R, R1·R2ᵀ, W2 with b2, WA and WB, or the salience: a row for each table of a layer, a column for each head.

    Orange is below 0 and purple above. Each map has its own scale; the number over it is the end of the scale.

    Args:
        model: a patched model.
        layers: indices among the layers that have tables; six layers if None.
        heads: indices of heads; four heads if None.

    Raises:
        NotPatchedError: for a model whose layers have no such table.
        InvalidConfigError: for a layer or a head that does not exist.
    """
    tables = tables_of(model)
    labels = list(dict.fromkeys(table.layer for table in tables))
    if not labels:
        raise NotPatchedError(
            f"This {type(model).__name__} has no layer with a learnt table: it is stock, or its variants only compare tokens."
        )
    chosen = [labels[index] for index in choose_indices(layers, len(labels), MOST_LAYERS, "layer with a table")]
    shown = [table for table in tables if table.layer in chosen]
    columns = choose_indices(heads, max(len(table.values) for table in shown), MOST_HEADS, "head")
    wide = [table.rows == "head" for table in shown]  # one map shows all heads, as rows
    heights = [
        0.3 if table.values.shape[-2] == 1 else 0.6 if is_wide else 1.0
        for table, is_wide in zip(shown, wide, strict=True)
    ]
    figure = Figure((CELL * 1.4 * len(columns) + 1.6, CELL * 1.25 * sum(heights) + 0.8), layout="constrained")
    grid = figure.add_gridspec(len(shown), len(columns), height_ratios=heights)
    for place, (table, is_wide) in enumerate(zip(shown, wide, strict=True)):
        shared = len(table.values) == 1  # by all heads
        for column, head in enumerate([0] if shared else columns):
            axis = figure.add_subplot(grid[place, slice(None) if is_wide else column])
            draw_map(axis, table.values[head], signed=True, aspect="auto")
            label_scale(axis, float(table.values[head].abs().max()), signed=True)
            axis.set_xlabel(table.columns, fontsize=7)
            if table.values.shape[-2] == 1:
                axis.set_yticks([])
            if column == 0:
                axis.set_ylabel(f"{table.layer}\n{table.part}: {table.symbol}\n{table.rows}", fontsize=7)
            if not is_wide:
                axis.set_title("all heads" if shared else f"head {head}", fontsize=8)
    figure.suptitle("orange below 0, purple above; the number over a map is the end of its scale", fontsize=8)
    return figure
