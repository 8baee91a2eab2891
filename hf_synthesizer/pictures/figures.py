"""What all pictures share: colours, maps of numbers, rows of labelled values, and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import InvalidConfigError

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a900")
"""The palette of Okabe and Ito, in an order whose neighbours differ most. The yellow is darker, to show on white."""
QUIET, STOCK = "#8a9299", "#000000"
WEIGHTS, SIGNED = "Blues", "PuOr"
"""Colour maps: of numbers from 0, and of numbers around 0."""
LEGEND_LINE = 3.2
"""The length of a line in a legend: long enough to tell a dashed line from a solid one."""
FORMATS = (".png", ".svg")
CELL = 1.5
"""Inches of a small map."""
LABELS_AN_INCH = 12
"""The largest number of token labels side by side."""


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure as PNG or SVG, by the ending of the path. Returns the path.

    Raises:
        InvalidConfigError: for another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InvalidConfigError(f"A picture is written as {' or '.join(FORMATS)}, and {path.name!r} ends otherwise.")
    with rc_context({"svg.fonttype": "none"}):  # text stays text, to search and to edit
        figure.savefig(path, dpi=dpi)
    return path


def draw_map(
    axis: Axes, values: torch.Tensor, *, signed: bool = False, top: float | None = None, **options: Any
) -> Any:
    """Draw a small map of numbers (rows, columns). Maps with the same `top` have the same scale."""
    top = (float(values.abs().max()) if top is None else top) or 1.0
    low, colours = (-top, SIGNED) if signed else (0.0, WEIGHTS)
    image = axis.imshow(values.numpy(), cmap=colours, vmin=low, vmax=top, interpolation="nearest", **options)
    axis.tick_params(labelsize=6, length=2)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(6, integer=True))
    return image


def label_scale(axis: Axes, top: float, *, signed: bool = False) -> None:
    """Write the value of a map's darkest colour over its right end."""
    axis.set_title(f"{'±' if signed else '≤'} {top:.2g}", fontsize=6, loc="right", pad=3)


def label_tokens(axis: Axes, tokens: Sequence[str], *, left: bool, below: bool, inches: float) -> None:
    """Write tokens at the axes of a map of this size: all if they fit, else every second, third, …"""
    room = max(2, int(inches * LABELS_AN_INCH))
    places = list(range(0, len(tokens), -(-len(tokens) // room)))
    labels = [tokens[place].replace("$", r"\$") for place in places]  # a dollar sign would start a formula
    size = min(6.0, max(4.5, 50 * inches / len(tokens)))
    axis.set_xticks(places, labels if below else [""] * len(places), rotation=90, fontsize=size)
    axis.set_yticks(places, labels if left else [""] * len(places), fontsize=size)


def labelled_rows(labels: Sequence[str], value: str) -> tuple[Figure, Axes]:
    """A figure with a row for each label, the first on top, and an axis of values from 0."""
    figure = Figure((7.0, 0.33 * len(labels) + 1.6), layout="constrained")
    axis = figure.subplots()
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(value)
    axis.grid(axis="x", alpha=0.3)
    return figure, axis


def choose_indices(indices: Sequence[int] | None, count: int, most: int, what: str) -> list[int]:
    """These indices; if None, up to `most` of `count`, evenly spread, with the first and the last.

    Raises:
        InvalidConfigError: for an index out of range.
    """
    for index in indices or ():
        if not 0 <= index < count:
            raise InvalidConfigError(f"There is no {what} {index}: they are 0 to {count - 1}.")
    if indices is not None:
        return list(indices)
    number = min(most, count)
    return sorted({round(place * (count - 1) / max(number - 1, 1)) for place in range(number)})
