"""The results of `suggest_layers` and `suggest_heads`: a hybrid for `patch_model`, and the measured costs."""

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
SHADES = " ░▒▓█"
"""From the cheapest head to the most expensive one."""


class Suggestion(dict[int | str, str | SynthesizerConfig]):
    """A hybrid `{layer: variant}`, ready for `patch_model(model, suggestion)`. Prints as a table.

    It is a dict that can be edited. `costs` maps each layer's label, such as "encoder.3", to the cost of synthesizing this layer
    alone. `total` maps each suggested layer, in the order of choice, to the cost of synthesizing it with all earlier ones.
    """

    def __init__(
        self, hybrid: Mapping[int | str, str | SynthesizerConfig], costs: dict[str, float], total: dict[str, float]
    ):
        super().__init__(hybrid)
        self.costs = costs
        self.total = total

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps`, `from_dict` and the command `patch --plan` accept."""
        return {"hybrid": hybrid_to_dict(self), "costs": self.costs, "total": self.total}

    @classmethod
    def from_dict(cls, data: Any) -> Suggestion:
        """The inverse of `to_dict`. The costs may be missing.

        Raises:
            InvalidConfigError: for data that names no layers.
        """
        hybrid = data.get("hybrid") if isinstance(data, Mapping) else None
        if not isinstance(hybrid, Mapping) or not hybrid:
            raise InvalidConfigError(
                'A plan is a dict such as {"hybrid": {"0": "random", "1": {"variant": "factorized_random", "rank": 4}}}, as '
                f"suggest_layers writes it; found {_describe(data)}."
            )
        measured: dict[str, dict[str, float]] = {}
        for name in ("costs", "total"):
            costs = data.get(name, {})
            if not isinstance(costs, Mapping):
                raise InvalidConfigError(f"{name!r} of a plan names a cost for each layer; found {_describe(costs)}.")
            measured[name] = {str(label): _number(cost, f"the cost of {label!r}") for label, cost in costs.items()}
        unmeasured = sorted(measured["total"].keys() - measured["costs"].keys())
        if unmeasured:
            raise InvalidConfigError(f"A plan's 'total' names {unmeasured[0]!r}, but its 'costs' do not.")
        return cls(hybrid_from_dict(hybrid), measured["costs"], measured["total"])

    def __str__(self) -> str:
        lines = [f"{'layer':14}{'swapped alone':>15}{'with the earlier':>18}  suggestion"]
        lines.append("-" * len(lines[0]))
        order = sorted(self.costs, key=lambda label: self.total.get(label, math.inf))
        for label in order:
            together = f"{self.total[label]:.4f}" if label in self.total else ""
            verdict = "synthesize" if label in self.total else "leave stock"
            lines.append(f"{label:14}{self.costs[label]:>15.4f}{together:>18}  {verdict}")
        return "\n".join(lines)


class HeadSuggestion(dict[int | str, str | SynthesizerConfig | list[SynthesizerConfig]]):
    """A hybrid `{layer: SynthesizerConfig(variant, heads=[…])}`, ready for `patch_model(model, suggestion)`.

    It is a dict that can be edited: `suggestion[3] = suggestion[3].replace(heads=[0, 1])`, `del suggestion[0]`.

    Attributes:
        variant: the configuration of the chosen heads.
        costs: for each layer, by its key in the hybrid, the cost of synthesizing each head alone: the squared change of the
            answers relative to their size. Costs rank heads; they do not add up.
        curve: for each measured number of heads, the change of the answers if these heads are synthesized together.
        budget: the budget of this hybrid. `at(budget)` makes a suggestion for another budget from the same costs.
        shared: for each layer, how many neighbouring heads share a key and are chosen together, by their mean cost. A layer
            that is not named has 1.
    """

    def __init__(
        self,
        variant: SynthesizerConfig,
        costs: Mapping[int | str, list[float]],
        budget: Budget,
        curve: Mapping[int, float] | None = None,
        shared: Mapping[int | str, int] | None = None,
    ):
        self.variant = variant
        self.shared = {layer: count for layer, count in (shared or {}).items() if count > 1}
        self.costs = dict(costs)
        self.curve = dict(curve or {})
        self.budget = budget
        chosen: dict[int | str, list[int]] = {}
        for layer, head in self.order[: count_of(budget, self.num_heads, "heads")]:
            chosen.setdefault(layer, []).append(head)
        super().__init__({key: variant.replace(heads=chosen[key]) for key in self.costs if key in chosen})

    @property
    def num_heads(self) -> int:
        """The number of heads in the model."""
        return sum(map(len, self.costs.values()))

    @property
    def order(self) -> list[tuple[int | str, int]]:
        """All heads as (layer, head), the cheapest first. Heads that share a key follow each other."""
        ranked = []
        for number, (layer, row) in enumerate(self.costs.items()):
            count = self.shared.get(layer, 1)
            for head, cost in enumerate(row):
                sharing = row[head // count * count :][:count]
                ranked.append((sum(sharing) / len(sharing), number, head // count, cost, layer, head))
        return [(layer, head) for *_, layer, head in sorted(ranked, key=lambda entry: entry[:4])]

    @property
    def heads(self) -> dict[int | str, list[int]]:
        """The synthesized heads of each layer in the present hybrid."""
        heads_by_layer: dict[int | str, list[int]] = {}
        for layer, row in self.costs.items():
            groups = [config.heads for config in _configs(self[layer])] if layer in self else []
            all_heads = [range(len(row)) if heads is None else heads for heads in groups]
            heads_by_layer[layer] = sorted(head for heads in all_heads for head in heads)
        return heads_by_layer

    def at(self, budget: Budget) -> HeadSuggestion:
        """Make a suggestion for another budget from the same costs."""
        return HeadSuggestion(self.variant, self.costs, budget, self.curve, self.shared)

    def picture(self) -> str:
        """Layers × heads as text. `·` is a synthesized head; for a stock head, a darker shade is a higher cost."""
        highest = max((max(row) for row in self.costs.values()), default=0.0) or 1.0
        lines = []
        for layer, row in self.costs.items():
            shades = [SHADES[1 + min(3, int(4 * math.sqrt(max(cost, 0.0) / highest)))] for cost in row]
            cells = ["·" if head in self.heads[layer] else shade for head, shade in enumerate(shades)]
            lines.append(f"{layer!s:>12}  {' '.join(cells)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        number = sum(map(len, self.heads.values()))
        lines = [
            f"{number} of {self.num_heads} heads get {self.variant.variant}; {self.num_heads - number} keep stock attention",
            "",
            f"{'layer':>12}  {'synthesized':24}  cost of each head alone, in thousandths",
        ]
        for layer, row in self.costs.items():
            others = (
                {config.variant for config in _configs(self[layer])} - {self.variant.variant} if layer in self else ()
            )
            synthesized = " ".join([f"{len(self.heads[layer])} of {len(row)}", *sorted(others)])
            lines.append(f"{layer!s:>12}  {synthesized:24}  {' '.join(f'{1000 * cost:.2f}' for cost in row)}")
        lines += ["", self.picture()]
        if self.curve:
            lines += ["", f"{'heads':>12}  {'share':>6}  change of the answers, heads together"]
            for count, change in sorted(self.curve.items()):
                lines.append(f"{count:>12}  {count / self.num_heads:>6.0%}  {change:.4f}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` and the command `patch --plan` accept: the measurements and the present hybrid."""
        return {
            "variant": self.variant.to_dict(),
            "budget": self.budget,
            "heads": [[key, row] for key, row in self.costs.items()],
            "curve": [[count, change] for count, change in self.curve.items()],
            "shared": [[key, count] for key, count in self.shared.items()],
            "hybrid": hybrid_to_dict(self),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadSuggestion:
        """The inverse of `to_dict`.

        Raises:
            InvalidConfigError: for anything else.
        """
        try:
            variant = SynthesizerConfig.from_dict(data["variant"])
            costs = {_key(key): [_number(cost, "a cost") for cost in row] for key, row in data["heads"]}
            curve = {
                int(_number(count, "a number of heads")): _number(change, "a change")
                for count, change in data["curve"]
            }
            shared = {_key(key): _number(count, "a number of heads") for key, count in data.get("shared", ())}
            if (
                not costs
                or not all(costs.values())
                or any(count != int(count) or count < 1 for count in shared.values())
            ):
                raise InvalidConfigError("it names no heads of some layer")
            if not all(1 <= count <= sum(map(len, costs.values())) for count in curve):
                raise InvalidConfigError("its curve names more heads than the model has, or none")
            suggestion = cls(variant, costs, data["budget"], curve, {key: int(count) for key, count in shared.items()})
            suggestion.clear()
            suggestion.update(hybrid_from_dict(data["hybrid"]))
            for key, heads in suggestion.heads.items():
                if heads and heads[-1] >= len(costs[key]):
                    raise InvalidConfigError(
                        f"layer {key!r} has {len(costs[key])} heads, and none of number {heads[-1]}"
                    )
            if suggestion.keys() - costs.keys():
                raise InvalidConfigError(f"layer {min(map(str, suggestion.keys() - costs.keys()))!r} was not measured")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidConfigError(
                f"This is no suggestion of suggest_heads ({type(error).__name__}: {error}). Read what save() wrote."
            ) from error
        return suggestion

    def save(self, path: str | os.PathLike) -> None:
        """Write the suggestion as JSON, to edit and to `load`."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> HeadSuggestion:
        """Read a file that `save` wrote.

        Raises:
            InvalidConfigError: for anything else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidConfigError(
                f"{path} is no JSON ({first_line(error)}), and no suggestion of suggest_heads."
            ) from error
        return cls.from_dict(data)


def _describe(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a dict of {', '.join(map(str, data)) or 'nothing'}"
    return f"a {type(data).__name__}"


def _configs(value: Any) -> list[SynthesizerConfig]:
    """The configurations of a layer in a hybrid: one, or one for each group of its heads."""
    groups = value if isinstance(value, (list, tuple)) else [value]
    return [SynthesizerConfig(group) if isinstance(group, str) else group for group in groups]


def _number(value: Any, name: str) -> float:
    """Return a finite number; raise `InvalidConfigError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise InvalidConfigError(f"{name} is a number, not {value!r}.")
    return value


def _key(key: Any) -> int | str:
    """Return the key of a layer in a hybrid; raise `InvalidConfigError` for anything else."""
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise InvalidConfigError(f"a layer is an index or a name, not {key!r}.")
    return key


def hybrid_to_dict(hybrid: Mapping[int | str, Any]) -> dict[str, Any]:
    """A dict for `json.dumps`: the variant, the configuration or the configurations of head groups of each layer."""

    def to_json(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [to_json(group) for group in value]
        return value.to_dict() if isinstance(value, SynthesizerConfig) else value

    return {str(layer): to_json(value) for layer, value in hybrid.items()}


def hybrid_from_dict(data: Mapping[str, Any]) -> dict[int | str, Any]:
    """The inverse of `hybrid_to_dict`.

    Raises:
        InvalidConfigError, UnknownVariantError: for a value that is no variant and no configuration.
    """
    if not isinstance(data, Mapping):
        raise InvalidConfigError(f"A hybrid is a dict of layers; found {_describe(data)}.")

    def from_json(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(group, Mapping) for group in value):
            return [SynthesizerConfig.from_dict(group) for group in value]
        if isinstance(value, Mapping):
            return SynthesizerConfig.from_dict(value)
        return SynthesizerConfig(value) and value  # raises for an unknown name

    return {int(key) if re.fullmatch("-?[0-9]{1,9}", key) else key: from_json(value) for key, value in data.items()}


def count_of(budget: Budget, available: int, unit: str) -> int:
    """The number of layers or heads in a budget: a share in (0, 1] (a float), or a number (an int).

    Raises:
        InvalidConfigError: for a budget out of range.
    """
    number = isinstance(budget, Integral) and not isinstance(budget, bool)
    share = isinstance(budget, Real) and not isinstance(budget, bool) and 0 < budget <= 1
    count = int(budget) if number else math.ceil(budget * available - 1e-9) if share else 0
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
