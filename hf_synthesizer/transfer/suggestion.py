"""The result of `suggest_layers` and `suggest_heads`: a hybrid for `patch_model`, and the measured costs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..checkpoints.whole_files import write_whole
from ..errors import InvalidConfigError, first_line
from ..synthesizers.config import SynthesizerConfig

Budget = float | int
Key = int | str
"""A layer in a hybrid: its index, or its label, such as "encoder.3", if the model has two stacks."""
SHADES = " ░▒▓█"
"""From the cheapest head to the most expensive one."""


class Suggestion(dict[Key, Any]):
    """A hybrid `{layer: variant}`, ready for `patch_model(model, suggestion)`. Prints as a table.

    It is a dict that can be edited: `del suggestion[0]`. For heads its values are configurations with `heads`:
    `suggestion[3] = suggestion[3].replace(heads=[0, 1])`. Build a suggestion of heads with `of_heads`.

    Attributes:
        costs: the cost of synthesizing each layer alone, by its label, such as "encoder.3". Of heads: for each layer, by its key in
            the hybrid, the cost of synthesizing each head alone, which is the squared change of the answers relative to their
            size. Costs of heads rank them; they do not add up.
        total: each suggested layer, in the order of choice, with the cost of synthesizing it with all earlier ones.
        variant: the configuration of the chosen heads. None if whole layers are suggested.
        budget: the budget of heads of this hybrid. `at(budget)` makes a suggestion for another budget from the same costs.
        curve: for each measured number of heads, the change of the answers if these heads are synthesized together.
        shared: for each layer, how many neighbouring heads share a key and are chosen together, by their mean cost. A layer
            that is not named has 1.
    """

    def __init__(
        self,
        hybrid: Mapping[Key, Any],
        costs: Mapping[Any, Any],
        total: Mapping[str, float] | None = None,
        *,
        variant: SynthesizerConfig | None = None,
        budget: Budget = 1.0,
        curve: Mapping[int, float] | None = None,
        shared: Mapping[Key, int] | None = None,
    ):
        super().__init__(hybrid)
        self.costs, self.total, self.curve = dict(costs), dict(total or {}), dict(curve or {})
        self.variant, self.budget = variant, budget
        self.shared = {layer: count for layer, count in (shared or {}).items() if count > 1}

    @classmethod
    def of_heads(
        cls,
        variant: SynthesizerConfig,
        costs: Mapping[Any, list[float]],
        budget: Budget,
        curve: Mapping[int, float] | None = None,
        shared: Mapping[Key, int] | None = None,
    ) -> Suggestion:
        """Choose the cheapest heads in a budget.

        Raises:
            InvalidConfigError: for a budget out of range.
        """
        return cls({}, costs, variant=variant, curve=curve, shared=shared).at(budget)

    def at(self, budget: Budget) -> Suggestion:
        """Make a suggestion of heads for another budget from the same costs.

        Raises:
            InvalidConfigError: for a budget out of range, or if whole layers are suggested.
        """
        chosen: dict[Key, list[int]] = {}
        for layer, head in self.order[: count_of(budget, self.num_heads, "heads")]:
            chosen.setdefault(layer, []).append(head)
        variant: Any = self.variant
        hybrid = {key: variant.replace(heads=chosen[key]) for key in self.costs if key in chosen}
        options: dict[str, Any] = {"budget": budget, "curve": self.curve, "shared": self.shared}
        return Suggestion(hybrid, self.costs, variant=variant, **options)

    @property
    def _head_costs(self) -> dict[Key, list[float]]:
        if self.variant is None:
            raise InvalidConfigError(
                "This suggestion has the costs of whole layers, and none of heads. suggest_heads measures heads. For another "
                "number of layers, call suggest_layers again."
            )
        return self.costs

    @property
    def num_heads(self) -> int:
        """The number of heads in the model."""
        return sum(map(len, self._head_costs.values()))

    @property
    def order(self) -> list[tuple[Key, int]]:
        """All heads as (layer, head), the cheapest first. Heads that share a key follow each other."""
        ranked = []
        for number, (layer, row) in enumerate(self._head_costs.items()):
            count = self.shared.get(layer, 1)
            for head, cost in enumerate(row):
                sharing = row[head // count * count :][:count]
                ranked.append((sum(sharing) / len(sharing), number, head // count, cost, layer, head))
        return [(layer, head) for *_, layer, head in sorted(ranked, key=lambda entry: entry[:4])]

    @property
    def heads(self) -> dict[Key, list[int]]:
        """The synthesized heads of each layer in the present hybrid."""
        heads_by_layer: dict[Key, list[int]] = {}
        for layer, row in self._head_costs.items():
            groups = [range(len(row)) if config.heads is None else config.heads for config in self._configs(layer)]
            heads_by_layer[layer] = sorted(head for heads in groups for head in heads)
        return heads_by_layer

    def _configs(self, layer: Key) -> list[SynthesizerConfig]:
        """The configurations of a layer: none, one, or one for each group of its heads."""
        value = self.get(layer, [])
        groups = value if isinstance(value, (list, tuple)) else [value]
        return [SynthesizerConfig(group) if isinstance(group, str) else group for group in groups]

    def picture(self) -> str:
        """Layers × heads as text. `·` is a synthesized head; for a stock head, a darker shade is a higher cost."""
        heads, lines = self.heads, []
        highest = max(map(max, self.costs.values()), default=0.0) or 1.0
        for layer, row in self.costs.items():
            shades = [SHADES[1 + min(3, int(4 * math.sqrt(max(cost, 0.0) / highest)))] for cost in row]
            cells = ["·" if head in heads[layer] else shade for head, shade in enumerate(shades)]
            lines.append(f"{layer!s:>12}  {' '.join(cells)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(self._layer_lines() if self.variant is None else self._head_lines(self.variant.variant))

    def _layer_lines(self) -> list[str]:
        header = f"{'layer':14}{'swapped alone':>15}{'with the earlier':>18}  suggestion"
        lines = [header, "-" * len(header)]
        for label in sorted(self.costs, key=lambda label: self.total.get(label, math.inf)):
            together = f"{self.total[label]:.4f}" if label in self.total else ""
            verdict = "synthesize" if label in self.total else "leave stock"
            lines.append(f"{label:14}{self.costs[label]:>15.4f}{together:>18}  {verdict}")
        return lines

    def _head_lines(self, variant: str) -> list[str]:
        heads, all_heads = self.heads, self.num_heads
        number = sum(map(len, heads.values()))
        lines = [
            f"{number} of {all_heads} heads get {variant}; {all_heads - number} keep stock attention",
            "",
            f"{'layer':>12}  {'synthesized':24}  cost of each head alone, in thousandths",
        ]
        for layer, row in self.costs.items():
            others = sorted({config.variant for config in self._configs(layer)} - {variant})
            synthesized = " ".join([f"{len(heads[layer])} of {len(row)}", *others])
            lines.append(f"{layer!s:>12}  {synthesized:24}  {' '.join(f'{1000 * cost:.2f}' for cost in row)}")
        lines += ["", self.picture()]
        if self.curve:
            lines += ["", f"{'heads':>12}  {'share':>6}  change of the answers, heads together"]
            lines += [f"{n:>12}  {n / all_heads:>6.0%}  {change:.4f}" for n, change in sorted(self.curve.items())]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps`, `from_dict` and the command `patch --plan` accept."""
        hybrid = {str(layer): _to_json(value) for layer, value in self.items()}
        if self.variant is None:
            return {"hybrid": hybrid, "costs": self.costs, "total": self.total}
        return {
            "variant": self.variant.to_dict(),
            "budget": self.budget,
            "heads": [[key, row] for key, row in self.costs.items()],
            "curve": [[count, change] for count, change in self.curve.items()],
            "shared": [[key, count] for key, count in self.shared.items()],
            "hybrid": hybrid,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Suggestion:
        """The inverse of `to_dict`. Costs of layers may be missing.

        Raises:
            InvalidConfigError: for anything else.
        """
        try:
            _require(isinstance(data, Mapping) and "hybrid" in data, "it is no dict with 'hybrid'")
            return _heads_from_dict(data) if "heads" in data else _layers_from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidConfigError(
                f"This is no suggestion of suggest_layers or suggest_heads ({type(error).__name__}: {error}). Read what save() "
                f'wrote, or write a dict such as {{"hybrid": {{"0": "random", "1": {{"variant": "dense"}}}}}}.'
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the suggestion as JSON, to edit and to `load`."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Suggestion:
        """Read a file that `save` or `hf-synthesizer suggest --json` wrote.

        Raises:
            InvalidConfigError: for anything else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidConfigError(f"{path} is no JSON ({first_line(error)}), and no suggestion.") from error
        return cls.from_dict(data)


def _layers_from_dict(data: Mapping[str, Any]) -> Suggestion:
    hybrid = _hybrid_from_json(data["hybrid"])
    costs, total = (
        {str(label): _number(cost, f"the cost of {label!r}") for label, cost in data.get(name, {}).items()}
        for name in ("costs", "total")
    )
    for label in total:
        _require(label in costs, f"its 'total' names {label!r}, but its 'costs' do not")
    _require(bool(hybrid), "it names no layers")
    return Suggestion(hybrid, costs, total)


def _heads_from_dict(data: Mapping[str, Any]) -> Suggestion:
    costs = {_key(key): [_number(cost, "a cost") for cost in row] for key, row in data["heads"]}
    curve = {int(_number(count, "a number of heads")): _number(change, "a change") for count, change in data["curve"]}
    shared = {_key(key): _number(count, "a number of heads") for key, count in data.get("shared", ())}
    hybrid, num_heads = _hybrid_from_json(data["hybrid"]), sum(map(len, costs.values()))
    _require(bool(costs) and all(costs.values()), "it names no heads of some layer")
    _require(all(count == int(count) >= 1 for count in shared.values()), "its 'shared' names no number of heads")
    _require(all(1 <= count <= num_heads for count in curve), "its curve names more heads than the model has, or none")
    count_of(data["budget"], num_heads, "heads")
    for key in hybrid:
        _require(key in costs, f"layer {key!r} was not measured")
    suggestion = Suggestion(
        hybrid,
        costs,
        variant=SynthesizerConfig.from_dict(data["variant"]),
        budget=data["budget"],
        curve=curve,
        shared={key: int(count) for key, count in shared.items()},
    )
    for key, heads in suggestion.heads.items():
        known = len(costs[key])
        _require(not heads or heads[-1] < known, f"layer {key!r} has {known} heads, and none of number {heads[-1:]}")
    return suggestion


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidConfigError(message)


def _number(value: Any, name: str) -> float:
    """Return a finite number; raise `InvalidConfigError` for anything else."""
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    _require(finite, f"{name} is a number, not {value!r}")
    return value


def _key(key: Any) -> Key:
    """Return the key of a layer in a hybrid; raise `InvalidConfigError` for anything else."""
    _require(isinstance(key, (int, str)) and not isinstance(key, bool), f"a layer is an index or a name, not {key!r}")
    return key


def _to_json(value: Any) -> Any:
    """The variant, the configuration or the configurations of head groups of a layer."""
    if isinstance(value, (list, tuple)):
        return [_to_json(group) for group in value]
    return value.to_dict() if isinstance(value, SynthesizerConfig) else value


def _hybrid_from_json(hybrid: Any) -> dict[Key, Any]:
    _require(isinstance(hybrid, Mapping), f"'hybrid' is a dict of layers, not a {type(hybrid).__name__}")

    def from_json(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(group, Mapping) for group in value):
            return [SynthesizerConfig.from_dict(group) for group in value]
        if isinstance(value, Mapping):
            return SynthesizerConfig.from_dict(value)
        return SynthesizerConfig(value) and value  # raises for an unknown name

    return {int(key) if re.fullmatch("-?[0-9]{1,9}", key) else key: from_json(value) for key, value in hybrid.items()}


def count_of(budget: Budget, available: int, unit: str) -> int:
    """The number of layers or heads in a budget: a share in (0, 1] (a float), or a number (an int).

    Raises:
        InvalidConfigError: for a budget out of range.
    """
    is_number = isinstance(budget, Integral) and not isinstance(budget, bool)
    is_share = isinstance(budget, Real) and not isinstance(budget, bool) and 0 < budget <= 1
    count = int(budget) if is_number else math.ceil(budget * available - 1e-9) if is_share else 0
    if not 1 <= count <= available:
        raise InvalidConfigError(
            f"budget must be a share of the {unit} in (0, 1] or a number of {unit} from 1 to {available}, not {budget!r}."
        )
    return count


def budgets_of(budget: Budget | Iterable[Budget]) -> list[Budget]:
    """A list of one or several budgets."""
    budgets = list(budget) if isinstance(budget, Iterable) and not isinstance(budget, str) else [budget]
    if not budgets:
        raise InvalidConfigError("budget is an empty list: name at least one share or number of heads.")
    return budgets
