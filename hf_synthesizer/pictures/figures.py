"""What all pictures have in common: colours, maps of numbers, and how they are written."""

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
"""Okabe and Ito's, in an order whose neighbours differ most; the yellow is darkened, for it stands on white."""
QUIET, STOCK = "#8a9299", "#000000"
WEIGHTS, SIGNED = "Blues", "PuOr"
"""Colour maps: of numbers from 0, and of numbers around 0."""
LEGEND_LINE = 3.2
"""How long a line is in a legend: dashes have to be told from a whole one."""
FORMATS = (".png", ".svg")
CELL = 1.5
"""Inches of a small map."""
LABELS_AN_INCH = 12
"""How many names of tokens stand side by side."""


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure as PNG or SVG, by the ending of the path; the path.

    Raises:
        InvalidConfigError: for another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InvalidConfigError(f"A picture is written as {' or '.join(FORMATS)}, and {path.name!r} ends otherwise.")
    with rc_context({"svg.fonttype": "none"}):  # words that can be searched and edited
        figure.savefig(path, dpi=dpi)
    return path


def draw_map(
    axis: Axes, values: torch.Tensor, *, signed: bool = False, top: float | None = None, **options: Any
) -> Any:
    """A small map of numbers (rows, columns); all maps that share `top` share their scale."""
    top = float(values.abs().max()) if top is None else top
    top = top or 1.0
    low = -top if signed else 0.0
    image = axis.imshow(
        values.numpy(), cmap=SIGNED if signed else WEIGHTS, vmin=low, vmax=top, interpolation="nearest", **options
    )
    axis.tick_params(labelsize=6, length=2)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(6, integer=True))
    return image


def label_scale(axis: Axes, top: float, *, signed: bool = False) -> None:
    """Over the right end of a map: what its darkest colour stands for."""
    axis.set_title(f"{'±' if signed else '≤'} {top:.2g}", fontsize=6, loc="right", pad=3)


def label_tokens(axis: Axes, tokens: Sequence[str], *, left: bool, below: bool, inches: float) -> None:
    """Tokens at the axes of a map of so many inches: all of them where there is room, else every second, third, …"""
    room = max(2, int(inches * LABELS_AN_INCH))
    places = list(range(0, len(tokens), -(-len(tokens) // room)))
    names = [plain(tokens[place]) for place in places]
    size = min(6.0, max(4.5, 50 * inches / len(tokens)))
    axis.set_xticks(places, names if below else [""] * len(places), rotation=90, fontsize=size)
    axis.set_yticks(places, names if left else [""] * len(places), fontsize=size)


def plain(text: str) -> str:
    """Text as it is: a dollar sign would start a formula."""
    return text.replace("$", r"\$")


def spread_out(count: int, most: int) -> list[int]:
    """Up to `most` of `count` numbers, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / max(most - 1, 1)) for place in range(most)})


def chosen(wanted: Sequence[int] | None, count: int, most: int, what: str) -> list[int]:
    """The wanted indices, or some.

    Raises:
        InvalidConfigError: for an index that there is not.
    """
    if wanted is None:
        return spread_out(count, most)
    for index in wanted:
        if not 0 <= index < count:
            raise InvalidConfigError(f"There is no {what} {index}: they are 0 to {count - 1}.")
    return list(wanted)
