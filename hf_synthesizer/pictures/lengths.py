"""`plot_lengths`: a measurement against the length of the sequence, with a line for each kind of attention."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..errors import InvalidConfigError
from .figures import COLOURS, LEGEND_LINE, QUIET, STOCK

Points = Sequence[tuple[int, float]]
MARKERS = "osD^vPX"
PEERS = {"floor": "-", "fnet": ":", "nystromformer": "--", "linformer": "-."}
"""Lines that are no synthesizers, with their dashes. They are grey."""
STOCK_DASHES = {"stock eager": ":", "stock sdpa, same library": "-."}
FUSED = " (fused)"
MAX_LINES = 8
"""The largest number of lines in one panel without groups."""
GROUPS = {
    "with a comparison of tokens": {"dot_product", "stock"},
    "made from each token": {"dense", "factorized_dense"},
    "tables": {"random", "fixed_random", "factorized_random"},
    "peers": set(PEERS),
}
EVERYWHERE = ("stock sdpa", "stock sdpa, same library", "floor")
"""Lines that each group repeats."""
OTHERS = "keys chosen first"
SPEED, MEMORY = ("speedup", "times as fast as stock SDPA"), ("peak_mb", "peak memory of a run, MB")
"""Columns of the benchmarks' results, and their labels."""


def curves(rows: Sequence[Mapping[str, str]], column: str) -> Iterator[tuple[str, dict[str, Points]]]:
    """From rows of a benchmark: the name of each set of conditions, and the points (length, number) of each variant.

    If a length was measured with several batch sizes, the largest counts.
    """
    groups: dict[str, dict[str, dict[int, tuple[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["status"] != "ok" or not row.get(column):
            continue
        name = "-".join((row["mode"], row["padding"], row["dtype"]))
        if row["dropout"] != "0.0":
            name += f"-dropout-{row['dropout']}"
        points, length, batch_size = groups[name][row["variant"]], int(row["length"]), int(row["batch_size"])
        if length not in points or points[length][0] < batch_size:
            points[length] = batch_size, float(row[column])
    for name, variants in groups.items():
        lines: dict[str, Points] = {
            variant: sorted((length, number) for length, (_, number) in points.items())
            for variant, points in variants.items()
        }
        if any(len(points) > 1 for points in lines.values()):
            yield name, lines


def describe_conditions(name: str) -> str:
    """The conditions in a name of `curves`: `train-none-float32` is "training, no padding, float32"."""
    mode, padding, dtype, *dropout = name.split("-")
    mode = "training" if mode == "train" else mode
    padding = "no padding" if padding == "none" else f"{padding} lengths"
    return ", ".join([mode, padding, dtype, *([" ".join(dropout)] if dropout else [])])


def plot_lengths(variants: Mapping[str, Points], label: str, title: str = "") -> Figure:
    """Draw lines on two logarithmic axes. Stock is black, floor and peers are grey, fused variants are dashed.

    More than eight lines are divided into panels, one for each kind of attention. Each panel repeats stock and floor.

    Args:
        variants: the points (length, number) of each line.
        label: the name of the numbers.
        title: the title of the figure.

    Raises:
        InvalidConfigError: for nothing to draw.
    """
    if not any(variants.values()):
        raise InvalidConfigError("There is nothing to draw: no variant has a point.")
    panels = {"": list(variants)} if len(variants) <= MAX_LINES else _panels(variants)
    rows = math.ceil(len(panels) / 2)
    columns = math.ceil(len(panels) / rows)
    figure = Figure((8, 5) if len(panels) == 1 else (7.2 * columns, 4 * rows), layout="constrained")
    for axis, (name, lines) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels.items(), strict=False):
        _draw(axis, {line: variants[line] for line in lines})
        axis.set_ylabel(label)
        axis.set_title(name, fontsize=10)
    for axis in figure.axes[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize=12)
    return figure


def _panels(variants: Mapping[str, Points]) -> dict[str, list[str]]:
    """The lines of each group, in their order, after the lines that each group repeats."""
    everywhere = [name for name in variants if name in EVERYWHERE]
    panels: dict[str, list[str]] = defaultdict(list)
    for name in variants:
        if name not in everywhere:
            parts = set(name.partition(" ")[0].split("+"))
            panels[next((group for group, members in GROUPS.items() if parts & members), OTHERS)].append(name)
    return {group: [*everywhere, *panels[group]] for group in (*GROUPS, OTHERS) if group in panels}


def _draw(axis: Axes, variants: Mapping[str, Points]) -> None:
    synthesizers = [
        name.removesuffix(FUSED) for name in variants if not name.startswith("stock") and name not in PEERS
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(synthesizers))}
    for variant, points in variants.items():
        style: dict[str, Any]
        if variant.startswith("stock"):
            style = {"color": STOCK, "linestyle": STOCK_DASHES.get(variant, "-"), "marker": "."}
        elif variant in PEERS:
            style = {"color": QUIET, "linestyle": PEERS[variant], "marker": "."}
        else:  # there may be more lines than colours, so the markers turn too
            number = numbers[variant.removesuffix(FUSED)]
            marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
            dashes = "--" if variant.endswith(FUSED) else "-"
            style = {"color": COLOURS[number % len(COLOURS)], "marker": marker, "linestyle": dashes}
        axis.plot(*zip(*points, strict=True), markersize=4, linewidth=1.3, label=variant, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({length for points in variants.values() for length, _ in points})
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.yaxis.set_major_formatter("{x:g}")
    values = [number for points in variants.values() for _, number in points]
    if max(values) < 40 * min(values):  # the range contains one or two powers of ten
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("length")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left", handlelength=LEGEND_LINE)
