"""`plot_lengths`: something measured against the length of the sequence, a line for each kind of attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ..errors import InvalidConfigError
from .figures import COLOURS, QUIET, STOCK

Points = Sequence[tuple[int, float]]
MARKERS = "osD^vPX"
BESIDE = {"floor": "-", "fnet": ":", "nystromformer": "--", "linformer": "-."}
"""What is drawn grey, and how: it is no synthesizer."""
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


def plot_lengths(variants: Mapping[str, Points], label: str, title: str = "") -> Figure:
    """One plot on two logarithmic axes; stock is black, floor and peers are grey, what is fused is dashed.

    Args:
        variants: the points (length, number) of each line.
        label: what the numbers are.
        title: of the plot.

    Raises:
        InvalidConfigError: for nothing to draw.
    """
    if not any(variants.values()):
        raise InvalidConfigError("There is nothing to draw: no variant has a point.")
    figure = Figure((8, 5), layout="constrained")
    axis = figure.subplots()
    ours = [name.removesuffix(" (fused)") for name in variants if not name.startswith("stock") and name not in BESIDE]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(ours))}
    for variant, points in variants.items():
        style: dict[str, Any]
        if variant.startswith("stock"):
            style = {"color": STOCK, "linestyle": ":" if variant.endswith("eager") else "-", "marker": "."}
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
    if max(numbers_shown) < 10 * min(numbers_shown):  # hardly a power of ten is among them
        axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("length")
    axis.set_ylabel(label)
    axis.set_title(title)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left")
    return figure
