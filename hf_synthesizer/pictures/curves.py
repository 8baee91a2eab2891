"""`plot_suggestion`, `plot_transfer` and `plot_training`: what was measured, layer by layer and step by step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..errors import InvalidConfigError
from ..transfer import HeadSuggestion, Suggestion, TransferReport
from .figures import COLOURS, QUIET, STOCK
from .heads import plot_heads

LOSSES = ("loss", "eval_loss", "train_loss")
ASIDE = ("epoch", "step", "learning_rate", "grad_norm", "total_flos")


def plot_suggestion(suggestion: Suggestion | HeadSuggestion | Mapping[str, Any]) -> Figure:
    """What each layer costs if it alone is swapped, and what the suggested ones cost together, in the order of their choice.

    Of heads: a map of layers × heads, and beside it what the budgets that were measured do to the answers.

    Args:
        suggestion: what `suggest_layers` or `suggest_heads` returned, or the dict of it.

    Raises:
        InvalidConfigError: for one without measurements.
    """
    if isinstance(suggestion, HeadSuggestion):
        return plot_heads(suggestion)
    given: Any = suggestion
    if isinstance(given, Mapping) and not isinstance(given, Suggestion) and "heads" in given:
        return plot_heads(HeadSuggestion.from_dict(given))
    found = given if isinstance(given, Suggestion) else Suggestion.from_dict(given)
    if not found.costs:
        raise InvalidConfigError("This suggestion holds no measured costs: take the one that suggest_layers returned.")
    labels = sorted(found.costs, key=lambda label: found.total.get(label, float("inf")))
    figure = Figure((7.0, 0.32 * len(labels) + 1.6), layout="constrained")
    axis = figure.subplots()
    colours = [COLOURS[0] if label in found.total else QUIET for label in labels]
    axis.barh(labels, [found.costs[label] for label in labels], color=colours, height=0.6)
    together = [label for label in labels if label in found.total]
    axis.plot(
        [found.total[label] for label in together],
        together,
        "D-",
        color=COLOURS[4],
        markersize=5,
        label="with the earlier ones",
    )
    handles: list[Any] = [*axis.lines, Patch(color=COLOURS[0], label="swapped alone: synthesize")]
    if len(together) < len(labels):
        handles.append(Patch(color=QUIET, label="swapped alone: leave stock"))
    axis.invert_yaxis()
    axis.set_xlabel("squared error of the last hidden states, relative to their variance")
    axis.set_xlim(left=0)
    axis.legend(handles=handles, fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    return figure


def plot_transfer(report: TransferReport | Mapping[str, Any]) -> Figure:
    """How far each layer's weights are from the teacher's before and after a transfer.

    Args:
        report: what `transfer_attention` returned, or the dict of it.

    Raises:
        InvalidConfigError: for what is no such report.
    """
    found = report if isinstance(report, TransferReport) else _report(report)
    labels = [f"{layer.label}  {layer.variant}" for layer in found.layers]
    places = range(len(labels))
    figure = Figure((7.0, 0.34 * len(labels) + 1.6), layout="constrained")
    axis = figure.subplots()
    before, after = [layer.before for layer in found.layers], [layer.after for layer in found.layers]
    axis.hlines(places, after, before, color=QUIET, linewidth=2, zorder=1)
    axis.scatter(before, places, color=COLOURS[1], marker="o", label="before", zorder=2)
    axis.scatter(after, places, color=COLOURS[0], marker="D", label="after", zorder=2)
    axis.set_yticks(places, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("divergence of the attention weights from the teacher's, nats")
    axis.set_title(
        f"{found.steps} steps; hidden states off by {found.error_before:.3f} → {found.error_after:.3f} of their variance",
        fontsize=9,
    )
    axis.legend(fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    return figure


def _report(data: Mapping[str, Any]) -> TransferReport:
    fields = TransferReport.__dataclass_fields__
    try:
        found = TransferReport.from_dict({name: value for name, value in data.items() if name in fields})
        str(found)  # every number of it is one
        return found
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        has = ", ".join(map(str, data)) if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise InvalidConfigError(f"This is no report of transfer_attention: it has {has or 'nothing'}.") from error


def plot_training(log: Any) -> Figure:
    """Losses and scores over the steps of a Trainer.

    Args:
        log: a Trainer, its state, its `log_history`, or a `trainer_state.json` by its path or the folder that holds it.

    Raises:
        InvalidConfigError: for a log that holds no loss and no score.
    """
    series = _series(_history(log))
    losses = {name: points for name, points in series.items() if name in LOSSES}
    scores = {name: points for name, points in series.items() if name not in LOSSES}
    if not series:
        raise InvalidConfigError(
            "This log holds neither a loss nor a score: let Trainer log (logging_steps) and evaluate."
        )
    panels = [(title, found) for title, found in (("loss", losses), ("score", scores)) if found]
    figure = Figure((5.0 * len(panels), 3.4), layout="constrained")
    for axis, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, (name, points) in enumerate(found.items()):
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
        data = json.loads((path / "trainer_state.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        return _history(data)
    if isinstance(state, Mapping):
        state = state.get("log_history")
    history = getattr(state, "log_history", state)
    if not isinstance(history, Sequence):
        raise InvalidConfigError(f"A Trainer's log was expected, and this is {type(log).__name__}.")
    return history


def _series(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for number, entry in enumerate(history):
        for name, value in entry.items():
            told = isinstance(value, (int, float)) and name not in ASIDE
            if told and (name in LOSSES or (name.startswith("eval_") and not _is_speed(name))):
                series.setdefault(name, []).append((entry.get("step", number), value))
    return {name: points for name, points in series.items() if name != "train_loss" or "loss" not in series}


def _is_speed(name: str) -> bool:
    return name.endswith(("_runtime", "_per_second", "_time", "_samples"))
