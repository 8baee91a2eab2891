"""The result of `suggest_layers` and `suggest_heads`: a hybrid for `patch_model`, and the measured costs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoints.whole_files import write_whole
from ..errors import InvalidConfigError, first_line
from ..synthesizers.config import SynthesizerConfig
from ..synthesizers.head_sizes import HeadShape
from .budgets import ResourceBudget, count_of, read_budget
from .head_menu import HeadMenu, Key
from .suggestion_text import head_lines, layer_lines, picture


class Suggestion(dict[Key, Any]):
    """A hybrid `{layer: variant}`, ready for `patch_model(model, suggestion)`. Prints as a table.

    It is a dict that can be edited: `del suggestion[0]`. For heads its values are configurations with `heads`:
    `suggestion[3] = suggestion[3].replace(heads=[0, 1])`. Build a suggestion of heads with `of_heads`.

    Attributes:
        costs: the cost of synthesizing each layer alone, by its label, such as "encoder.3". Of heads: for each layer, by its key in
            the hybrid, the cost of synthesizing each head alone, which is the squared change of the answers relative to their
            size. Costs of heads rank them; they do not add up.
        total: each suggested layer, in the order of choice, with the cost of synthesizing it with all earlier ones.
        variant: the configuration of the chosen heads, the first of a menu. None if whole layers are suggested.
        menu: of several kinds of heads: the kinds, and the costs of each. `costs` then has the cost of each head's cheapest kind.
        budget: the budget of heads of this hybrid. `at(budget)` makes a suggestion for another budget from the same costs.
        curve: for each measured number of heads, or `ResourceBudget`, the change of the answers if these heads are synthesized
            together.
        shapes: for each layer, what the resources that a head needs depend on.
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
        menu: Sequence[tuple[SynthesizerConfig, Mapping[Key, list[float]]]] = (),
        budget: Any = 1.0,
        curve: Mapping[Any, float] | None = None,
        shared: Mapping[Key, int] | None = None,
        shapes: Mapping[Key, HeadShape] | None = None,
    ):
        super().__init__(hybrid)
        self.costs, self.total, self.curve = dict(costs), dict(total or {}), dict(curve or {})
        self.variant, self.budget, self.shapes = variant, budget, dict(shapes or {})
        self.menu = [(kind, dict(rows)) for kind, rows in menu]
        self.shared = {layer: count for layer, count in (shared or {}).items() if count > 1}

    @classmethod
    def of_heads(
        cls,
        variant: SynthesizerConfig | Sequence[SynthesizerConfig],
        costs: Any,
        budget: Any,
        curve: Mapping[Any, float] | None = None,
        shared: Mapping[Key, int] | None = None,
        shapes: Mapping[Key, HeadShape] | None = None,
    ) -> Suggestion:
        """Choose the cheapest heads in a budget.

        Args:
            variant: the configuration of the chosen heads; or the kinds of a menu.
            costs: for each layer the costs of its heads; for a menu a list of such dicts, one for each kind.
            budget, curve, shared, shapes: as the attributes.

        Raises:
            InvalidConfigError: for a budget out of range.
        """
        options: dict[str, Any] = {"curve": curve, "shared": shared, "shapes": shapes}
        if not isinstance(variant, SynthesizerConfig) and len(variant) == 1:
            (variant,), (costs,) = variant, costs
        if isinstance(variant, SynthesizerConfig):
            return cls({}, costs, variant=variant, **options).at(budget)
        cheapest = {
            layer: [min(alternatives) for alternatives in zip(*(rows[layer] for rows in costs), strict=True)]
            for layer in costs[0]
        }
        menu = list(zip(variant, costs, strict=True))
        return cls({}, cheapest, variant=variant[0], menu=menu, **options).at(budget)

    def size_of(self, budget: Any) -> int | ResourceBudget:
        """The key of a budget in `curve`: a number of heads, or a share of a resource.

        Raises:
            InvalidConfigError: for a budget out of range, or one that the kinds of heads cannot meet.
        """
        budget = read_budget(budget)
        if not isinstance(budget, ResourceBudget):
            return count_of(budget, self.num_heads, "heads")
        self.head_menu.within(budget)
        return budget

    def at(self, budget: Any) -> Suggestion:
        """Make a suggestion of heads for another budget from the same costs.

        Args:
            budget: a share of the heads (a float in (0, 1], rounded up); a number of heads (an int); or a share of what stock
                attention needs of a resource at a length: `{"cache": 0.3, "length": 8192}` or
                `{"multiply_adds": 0.5, "length": 2048}`.

        Raises:
            InvalidConfigError: for a budget out of range, or one that the kinds of heads cannot meet; if whole layers are suggested.
        """
        budget, menu = read_budget(budget), self.head_menu
        resource = isinstance(budget, ResourceBudget)
        chosen = menu.within(budget) if resource else menu.cheapest(count_of(budget, self.num_heads, "heads"))
        hybrid: dict[Key, Any] = {}
        for layer in self.costs:
            groups = [
                kind.replace(heads=heads[layer])
                for kind, heads in zip(menu.kinds, chosen, strict=True)
                if layer in heads
            ]
            if groups:
                hybrid[layer] = groups if len(groups) > 1 else groups[0]
        options: dict[str, Any] = {
            "curve": self.curve,
            "shared": self.shared,
            "shapes": self.shapes,
            "menu": self.menu,
        }
        return Suggestion(hybrid, self.costs, variant=self.variant, budget=budget, **options)

    @property
    def head_menu(self) -> HeadMenu:
        """The kinds of heads with their costs, from which `at` chooses."""
        menu: Any = self.menu or [(self.variant, self._head_costs)]
        kinds, costs = zip(*menu, strict=True)
        return HeadMenu(kinds, costs, self.shared, self.shapes)

    def share(self, resource: str, length: int) -> float:
        """What the present hybrid needs of "cache" or "multiply_adds" at a length, relative to stock attention.

        Raises:
            InvalidConfigError: if the resource is unknown, stock attention needs none of it, or the suggestion has no shapes.
        """
        return self.head_menu.share(resource, length, {layer: self._kinds_of_heads(layer) for layer in self.costs})

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
        return [(layer, head) for layer, head, _ in self.head_menu.order()]

    @property
    def heads(self) -> dict[Key, list[int]]:
        """The synthesized heads of each layer in the present hybrid."""
        heads_by_layer: dict[Key, list[int]] = {}
        for layer, row in self._head_costs.items():
            groups = [range(len(row)) if config.heads is None else config.heads for config in self.configs(layer)]
            heads_by_layer[layer] = sorted(head for heads in groups for head in heads)
        return heads_by_layer

    def configs(self, layer: Key) -> list[SynthesizerConfig]:
        """The configurations of a layer: none, one, or one for each group of its heads."""
        value = self.get(layer, [])
        groups = value if isinstance(value, (list, tuple)) else [value]
        return [SynthesizerConfig(group) if isinstance(group, str) else group for group in groups]

    def _kinds_of_heads(self, layer: Key) -> list[SynthesizerConfig | None]:
        """The configuration of each head of a layer in the present hybrid; None for a stock head."""
        kinds: dict[int, SynthesizerConfig] = {}
        heads = range(len(self.costs[layer]))
        for config in self.configs(layer):
            kinds |= dict.fromkeys(heads if config.heads is None else config.heads, config.replace(heads=None))
        return [kinds.get(head) for head in heads]

    @property
    def heads_by_kind(self) -> dict[SynthesizerConfig, dict[Key, list[int]]]:
        """For each kind in the menu and in the present hybrid, the heads of each layer that get it."""
        kinds: dict[SynthesizerConfig, dict[Key, list[int]]] = {
            kind.replace(heads=None): {} for kind in self.head_menu.kinds
        }
        for layer in self.costs:
            for head, kind in enumerate(self._kinds_of_heads(layer)):
                if kind is not None:
                    kinds.setdefault(kind, {}).setdefault(layer, []).append(head)
        return kinds

    def picture(self) -> str:
        """Layers × heads as text. `·`, or with a menu the letter of its kind, is a synthesized head; a darker shade is a higher cost
        of a stock head."""
        return picture(self)

    def __str__(self) -> str:
        return "\n".join(layer_lines(self) if self.variant is None else head_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps`, `from_dict` and the command `patch --plan` accept."""
        hybrid = {str(layer): _to_json(value) for layer, value in self.items()}
        if self.variant is None:
            return {"hybrid": hybrid, "costs": self.costs, "total": self.total}
        data = {
            "variant": self.variant.to_dict(),
            "budget": _to_json(self.budget),
            "heads": [[key, row] for key, row in self.costs.items()],
            "curve": [[_to_json(budget), change] for budget, change in self.curve.items()],
            "shared": [[key, count] for key, count in self.shared.items()],
            "shapes": [[key, asdict(shape)] for key, shape in self.shapes.items()],
            "hybrid": hybrid,
        }
        menu = [[kind.to_dict(), [[key, row] for key, row in rows.items()]] for kind, rows in self.menu]
        return {**data, "menu": menu} if menu else data

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
    costs = _rows_from_json(data["heads"])
    hybrid, num_heads = _hybrid_from_json(data["hybrid"]), sum(map(len, costs.values()))
    curve = {_measured_budget(budget): _number(change, "a change") for budget, change in data["curve"]}
    shared = {_key(key): _number(count, "a number of heads") for key, count in data.get("shared", ())}
    shapes = {_key(key): HeadShape.from_dict(shape) for key, shape in data.get("shapes", ())}
    menu = [(SynthesizerConfig.from_dict(kind), _rows_from_json(rows)) for kind, rows in data.get("menu", ())]
    budget = read_budget(data["budget"])
    _require(bool(costs) and all(costs.values()), "it names no heads of some layer")
    _require(all(count == int(count) >= 1 for count in shared.values()), "its 'shared' names no number of heads")
    counts = [count for count in curve if not isinstance(count, ResourceBudget)]
    _require(
        all(1 <= count <= num_heads for count in counts), "its curve names more heads than the model has, or none"
    )
    _require(not shapes or shapes.keys() == costs.keys(), "its 'shapes' name other layers than its 'heads'")
    for _, rows in menu:
        same = [(key, len(row)) for key, row in rows.items()] == [(key, len(row)) for key, row in costs.items()]
        _require(same, "its 'menu' has costs of other heads")
    for key in hybrid:
        _require(key in costs, f"layer {key!r} was not measured")
    suggestion = Suggestion(
        hybrid,
        costs,
        variant=SynthesizerConfig.from_dict(data["variant"]),
        menu=menu,
        budget=budget,
        curve=curve,
        shared={key: int(count) for key, count in shared.items()},
        shapes=shapes,
    )
    suggestion.size_of(budget)
    for key, heads in suggestion.heads.items():
        known = len(costs[key])
        _require(not heads or heads[-1] < known, f"layer {key!r} has {known} heads, and none of number {heads[-1:]}")
    return suggestion


def _rows_from_json(rows: Any) -> dict[Key, list[float]]:
    return {_key(key): [_number(cost, "a cost") for cost in row] for key, row in rows}


def _measured_budget(budget: Any) -> int | ResourceBudget:
    """The key of a curve: a number of heads, or a share of a resource."""
    if isinstance(budget, Mapping):
        return ResourceBudget.from_dict(budget)
    return int(_number(budget, "a number of heads"))


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
    """The variant, the configuration or the configurations of head groups of a layer; or a budget."""
    if isinstance(value, (list, tuple)):
        return [_to_json(group) for group in value]
    return value.to_dict() if isinstance(value, (SynthesizerConfig, ResourceBudget)) else value


def _hybrid_from_json(hybrid: Any) -> dict[Key, Any]:
    _require(isinstance(hybrid, Mapping), f"'hybrid' is a dict of layers, not a {type(hybrid).__name__}")

    def from_json(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(group, Mapping) for group in value):
            return [SynthesizerConfig.from_dict(group) for group in value]
        if isinstance(value, Mapping):
            return SynthesizerConfig.from_dict(value)
        return SynthesizerConfig(value) and value  # raises for an unknown name

    return {int(key) if re.fullmatch("-?[0-9]{1,9}", key) else key: from_json(value) for key, value in hybrid.items()}
