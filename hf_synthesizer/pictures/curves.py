"""`plot_suggestion`, `plot_transfer` and `plot_training`: measurements by layer, by head and by step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..errors import InvalidConfigError
from ..transfer import Suggestion, TransferReport
from ..transfer.budgets import RESOURCES, ResourceBudget
from ..transfer.head_menu import describe_kind
from .figures import COLOURS, QUIET, STOCK, draw_map, labelled_rows

LOSSES = ("loss", "eval_loss", "train_loss")
SPEEDS = ("runtime", "per_second", "time", "samples")
"""Endings of entries that are no scores."""
HEAD = 0.3
"""Inches of a head in a map of heads."""
KINDS = (COLOURS[4], COLOURS[2], STOCK, COLOURS[1], COLOURS[6], COLOURS[3])
"""Colours of kinds of heads, which show on a blue map."""


def plot_suggestion(suggestion: Suggestion | Mapping[str, Any]) -> Figure:
    """The cost of swapping each layer alone, and the cost of the suggested layers together, in the order of choice.

    For heads: a map of layers × heads, and beside it the change of the answers for each measured budget.

    Args:
        suggestion: the result of `suggest_layers` or `suggest_heads`, or its `to_dict()`.

    Raises:
        InvalidConfigError: for a suggestion without measurements.
    """
    if not isinstance(suggestion, Suggestion):
        suggestion = Suggestion.from_dict(suggestion)
    return _plot_layers(suggestion) if suggestion.variant is None else _plot_heads(suggestion)


def _plot_layers(suggestion: Suggestion) -> Figure:
    costs, total = suggestion.costs, suggestion.total
    if not costs:
        raise InvalidConfigError("This suggestion holds no measured costs: take the one that suggest_layers returned.")
    labels = sorted(costs, key=lambda label: total.get(label, float("inf")))
    together = [total[label] for label in labels if label in total]
    figure, axis = labelled_rows(labels, "squared error of the last hidden states, relative to their variance")
    colours = [COLOURS[0]] * len(together) + [QUIET] * (len(labels) - len(together))
    axis.barh(range(len(labels)), [costs[label] for label in labels], color=colours, height=0.6)
    axis.plot(together, range(len(together)), "D-", color=COLOURS[4], markersize=5, label="with the earlier ones")
    handles: list[Any] = [*axis.lines, Patch(color=COLOURS[0], label="swapped alone: synthesize")]
    if len(together) < len(labels):
        handles.append(Patch(color=QUIET, label="swapped alone: leave stock"))
    axis.set_xlim(left=0)
    axis.legend(handles=handles, fontsize=8)
    return figure


def _plot_heads(suggestion: Suggestion) -> Figure:
    """The root of each head's cost, with a dot on synthesized heads, and the curves of the measured budgets.

    With a menu, each kind of heads has dots of one colour.
    """
    rows, columns = len(suggestion.costs), max(map(len, suggestion.costs.values()))
    widths = [HEAD * columns + 2.2, 3.6][: 2 if suggestion.curve else 1]
    figure = Figure((sum(widths), max(HEAD * rows + 1.4, 2.6)), layout="constrained")
    heads, *curves = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    values = torch.full((rows, columns), torch.nan)  # a head that a layer does not have stays white
    for row, costs in enumerate(suggestion.costs.values()):
        values[row, : len(costs)] = torch.tensor(costs).clamp(min=0).sqrt()
    image = draw_map(heads, values, top=float(values.nan_to_num().max()))
    for label, colour, dots in _dots(suggestion):
        heads.plot(*zip(*dots, strict=True), ".", color=colour, markersize=6, label=label)
    if heads.lines:
        heads.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    heads.set_yticks(range(rows), [str(layer) for layer in suggestion.costs], fontsize=7)
    heads.set_xlabel("head")
    heads.set_ylabel("layer")
    figure.colorbar(image, ax=heads, label="√ cost of swapping this head alone", shrink=0.9)
    for axis in curves:
        lines = _curves(suggestion)
        for (label, points), colour in zip(lines.items(), itertools.cycle(COLOURS)):
            axis.plot(*zip(*sorted(points), strict=True), "o-", color=colour, markersize=4, label=label)
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_xlabel(next(iter(lines)) if len(lines) == 1 else "share of heads, or of stock's need")
        if len(lines) > 1:
            axis.legend(fontsize=7)
        axis.set_ylabel("squared change of\nthe answers, relative")
        axis.grid(alpha=0.3)
    return figure


def _dots(suggestion: Suggestion) -> list[tuple[str, str, list[tuple[int, int]]]]:
    """The label, colour and places (head, row) of the synthesized heads, by kind if there is a menu."""
    rows = {layer: row for row, layer in enumerate(suggestion.costs)}
    places = {
        kind: [(head, rows[layer]) for layer, heads in by_layer.items() for head in heads]
        for kind, by_layer in suggestion.heads_by_kind.items()
    }
    if suggestion.menu:
        colours = zip(places.items(), itertools.cycle(KINDS))
        return [(describe_kind(kind), colour, dots) for (kind, dots), colour in colours if dots]
    dots = sorted(place for dots in places.values() for place in dots)
    return [("synthesized", KINDS[0], dots)] if dots else []


def _curves(suggestion: Suggestion) -> dict[str, list[tuple[float, float]]]:
    """The points (share, change) of each curve of budgets, by its label."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for budget, change in suggestion.curve.items():
        if isinstance(budget, ResourceBudget):
            label = f"{RESOURCES[budget.resource]}\nat {budget.length:,} tokens"
            curves.setdefault(label, []).append((budget.share, change))
        else:
            curves.setdefault("heads synthesized together", []).append((budget / suggestion.num_heads, change))
    return curves


def plot_transfer(report: TransferReport | Mapping[str, Any]) -> Figure:
    """The divergence of each layer's weights from the teacher's, before and after a transfer.

    Args:
        report: the result of `transfer_attention`, or its `to_dict()`.

    Raises:
        InvalidConfigError: for anything else.
    """
    report = report if isinstance(report, TransferReport) else _transfer_report(report)
    places = range(len(report.layers))
    before, after = [layer.before for layer in report.layers], [layer.after for layer in report.layers]
    figure, axis = labelled_rows(
        [f"{layer.label}  {layer.variant}" for layer in report.layers],
        "divergence of the attention weights from the teacher's, nats",
    )
    axis.hlines(places, after, before, color=QUIET, linewidth=2, zorder=1)
    axis.scatter(before, places, color=COLOURS[1], marker="o", label="before", zorder=2)
    axis.scatter(after, places, color=COLOURS[0], marker="D", label="after", zorder=2)
    errors = f"{report.error_before:.3f} → {report.error_after:.3f}"
    axis.set_title(f"{report.steps} steps; hidden states off by {errors} of their variance", fontsize=9)
    axis.set_xlim(left=0)
    axis.legend(fontsize=8)
    return figure


def _transfer_report(data: Mapping[str, Any]) -> TransferReport:
    try:
        fields = TransferReport.__dataclass_fields__
        report = TransferReport.from_dict({name: value for name, value in data.items() if name in fields})
        str(report)  # fails if a number is none
        return report
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        has = ", ".join(map(str, data)) if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise InvalidConfigError(f"This is no report of transfer_attention: it has {has or 'nothing'}.") from error


def plot_training(log: Any) -> Figure:
    """Losses and scores over the steps of a Trainer.

    Args:
        log: a Trainer, its state, its `log_history`, or the path of a `trainer_state.json` or of its folder.

    Raises:
        InvalidConfigError: for a log without a loss and without a score.
    """
    series = _series(_history(log))
    if not series:
        raise InvalidConfigError(
            "This log holds neither a loss nor a score: let Trainer log (logging_steps) and evaluate."
        )
    losses = {name: points for name, points in series.items() if name in LOSSES}
    scores = {name: points for name, points in series.items() if name not in LOSSES}
    panels = {title: lines for title, lines in (("loss", losses), ("score", scores)) if lines}
    figure = Figure((5.0 * len(panels), 3.4), layout="constrained")
    for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for number, (name, points) in enumerate(lines.items()):
            colour = STOCK if name == "loss" else COLOURS[number % len(COLOURS)]
            axis.plot(*zip(*points, strict=True), color=colour, marker=".osD^v"[number % 6], markersize=4, label=name)
        axis.set_xlabel("step")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(title)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    return figure


def _history(log: Any) -> Sequence[Mapping[str, Any]]:
    state = getattr(log, "state", log)
    if isinstance(state, (str, Path)):
        path = Path(state)
        state = json.loads((path / "trainer_state.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if isinstance(state, Mapping):
        state = state.get("log_history")
    history = getattr(state, "log_history", state)
    if not isinstance(history, Sequence):
        raise InvalidConfigError(f"A Trainer's log was expected, and this is {type(log).__name__}.")
    return history


def _series(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The points (step, value) of each loss and score."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, entry in enumerate(history):
        for name, value in entry.items():
            is_score = name.startswith("eval_") and not name.endswith(SPEEDS)
            if isinstance(value, (int, float)) and (name in LOSSES or is_score):
                series.setdefault(name, []).append((entry.get("step", number), value))
    return {name: points for name, points in series.items() if name != "train_loss" or "loss" not in series}
