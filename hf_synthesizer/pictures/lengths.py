"""`plot_lengths`: something measured against the length of the sequence, a line for each kind of attention."""

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
BESIDE = {"floor": "-", "fnet": ":", "nystromformer": "--", "linformer": "-."}
"""What is drawn grey, and how: it is no synthesizer."""
FEW_LINES = 8
GROUPS = {
    "with a comparison of tokens": {"dot_product", "stock"},
    "made from each token": {"dense", "factorized_dense"},
    "tables": {"random", "fixed_random", "factorized_random"},
    "peers": set(BESIDE),
}
EVERYWHERE = ("stock sdpa", "stock sdpa, same library", "floor")
OTHERS = "keys chosen first"
SPEED, MEMORY = ("speedup", "times as fast as stock SDPA"), ("peak_mb", "peak memory of a run, MB")
"""Columns of the results of the benchmarks, and what they are."""


def curves(rows: Sequence[Mapping[str, str]], column: str) -> Iterator[tuple[str, dict[str, Points]]]:
    """From rows of a benchmark: for each set of conditions but the length, a name and the points of each variant.

    The batch size may differ from length to length: where there are several, the largest counts.
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
        found: dict[str, Points] = {
            variant: sorted((length, number) for length, (_, number) in points.items())
            for variant, points in variants.items()
        }
        if any(len(points) > 1 for points in found.values()):
            yield name, found


def in_words(name: str) -> str:
    """The conditions that `curves` names, in words: `train-none-float32` is "training, no padding, float32"."""
    mode, padding, dtype, *dropout = name.split("-")
    words = [
        "training" if mode == "train" else mode,
        "no padding" if padding == "none" else f"{padding} lengths",
        dtype,
    ]
    return ", ".join([*words, " ".join(dropout)] if dropout else words)


def plot_lengths(variants: Mapping[str, Points], label: str, title: str = "") -> Figure:
    """On two logarithmic axes; stock is black, floor and peers are grey, what is fused is dashed.

    One plot where lines are few. Where they are many, a plot for each group of `GROUPS` that has some, with what is in `EVERYWHERE`.

    Args:
        variants: the points (length, number) of each line.
        label: what the numbers are.
        title: of the figure.

    Raises:
        InvalidConfigError: for nothing to draw.
    """
    if not any(variants.values()):
        raise InvalidConfigError("There is nothing to draw: no variant has a point.")
    panels = {"": list(variants)} if len(variants) <= FEW_LINES else _panels(variants)
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
    """The lines of each group, in their order; what stands in every panel first."""
    everywhere = [name for name in variants if name in EVERYWHERE]
    found: dict[str, list[str]] = defaultdict(list)
    for name in variants:
        if name not in everywhere:
            parts = set(name.partition(" ")[0].split("+"))
            group = next((group for group, members in GROUPS.items() if parts & members), OTHERS)
            found[group].append(name)
    return {group: [*everywhere, *found[group]] for group in (*GROUPS, OTHERS) if group in found}


def _draw(axis: Axes, variants: Mapping[str, Points]) -> None:
    ours = [name.removesuffix(" (fused)") for name in variants if not name.startswith("stock") and name not in BESIDE]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(ours))}
    for variant, points in variants.items():
        style: dict[str, Any]
        if variant.startswith("stock"):
            dashes = {"stock eager": ":", "stock sdpa, same library": "-."}
            style = {"color": STOCK, "linestyle": dashes.get(variant, "-"), "marker": "."}
        elif variant in BESIDE:
            style = {"color": QUIET, "linestyle": BESIDE[variant], "marker": "."}
        else:  # a colour and a marker of its own: seven colours have to do for more lines
            number = numbers[variant.removesuffix(" (fused)")]
            marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": marker}
            style["linestyle"] = "--" if variant.endswith(" (fused)") else "-"
        axis.plot(*zip(*points, strict=True), markersize=4, linewidth=1.3, label=variant, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({length for points in variants.values() for length, _ in points})
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.yaxis.set_major_formatter("{x:g}")
    numbers_shown = [number for points in variants.values() for _, number in points]
    if max(numbers_shown) < 40 * min(numbers_shown):  # hardly a power of ten is among them
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("length")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left", handlelength=LEGEND_LINE)
