"""`HeadMenu`: kinds of synthesized heads with the cost of each head, and the cheapest choice under a budget."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..errors import InvalidConfigError
from ..layers.finding.attention_layers import AttentionLayer
from ..layers.finding.projections import (
    any_projection_names,
    find_projection_names,
    head_dim,
    in_features,
    query_heads,
    value_heads,
)
from ..layers.lengths import config_of, known_length
from ..synthesizers.config import SynthesizerConfig
from ..synthesizers.head_sizes import STOCK_HEAD, HeadShape, cached_numbers, multiply_adds
from ..synthesizers.options import is_positive_int
from .budgets import CACHE, RESOURCES, ResourceBudget
from .cheapest import Choice, sweep

Key = int | str
"""A layer in a hybrid: its index, or its label, such as "encoder.3", if the model has two stacks."""
Heads = dict[Key, list[int]]


@dataclass(frozen=True)
class HeadMenu:
    """What the heads of a model can become, and what it costs.

    Attributes:
        kinds: the configurations from which each head gets one, or stays stock.
        costs: for each kind and each layer, the costs of the heads.
        shared: for each layer, how many neighbouring heads are chosen together. A layer that is not named has 1.
        shapes: for each layer, what the resources of its heads depend on. Empty if they are unknown.
    """

    kinds: Sequence[SynthesizerConfig]
    costs: Sequence[Mapping[Key, list[float]]]
    shared: Mapping[Key, int]
    shapes: Mapping[Key, HeadShape]

    def units(self) -> list[tuple[Key, range]]:
        """The heads that are chosen together, as layers and heads."""
        units = []
        for layer, row in self.costs[0].items():
            count = self.shared.get(layer, 1)
            units += [(layer, range(first, min(first + count, len(row)))) for first in range(0, len(row), count)]
        return units

    def cost(self, kind: int, layer: Key, heads: Iterable[int]) -> float:
        """The sum of the costs of some heads of a layer."""
        row = self.costs[kind][layer]
        return sum(row[head] for head in heads)

    def order(self) -> list[tuple[Key, int, int]]:
        """All heads as (layer, head, number of the cheapest kind), the cheapest first. Heads of a unit follow each other."""
        ranked = []
        for number, (layer, heads) in enumerate(self.units()):
            kind = min(range(len(self.kinds)), key=lambda kind: self.cost(kind, layer, heads))
            mean = self.cost(kind, layer, heads) / len(heads)
            ranked += [(mean, number, self.costs[kind][layer][head], layer, head, kind) for head in heads]
        return [(layer, head, kind) for *_, layer, head, kind in sorted(ranked, key=lambda entry: entry[:3])]

    def cheapest(self, count: int) -> list[Heads]:
        """The heads of each kind, if so many heads in all are synthesized at the least cost."""
        chosen: list[Heads] = [{} for _ in self.kinds]
        for layer, head, kind in self.order()[:count]:
            chosen[kind].setdefault(layer, []).append(head)
        return chosen

    def within(self, budget: ResourceBudget) -> list[Heads]:
        """The heads of each kind in the first plan of a `sweep` that is within the budget.

        Raises:
            InvalidConfigError: if no plan is, or if heads that share a key are chosen one by one for a budget of the cache.
        """
        self._require_resource(budget.resource, budget.length)
        units, kinds = self.units(), [STOCK_HEAD, *self.kinds]
        choices = []
        for layer, heads in units:
            shape = self.shapes[layer]
            if budget.resource == CACHE and shape.causal and len(heads) != shape.sharing:
                raise InvalidConfigError(
                    f"A budget of the cache needs heads that share a key to be chosen together: layer {layer!r} has {shape.sharing} "
                    f"heads to a key. Leave out whole_keys=False, or give a share or a number of heads."
                )
            needs = [self._need(budget.resource, [kind] * len(heads), shape, budget.length) for kind in kinds]
            costs = [0.0, *(self.cost(kind, layer, heads) for kind in range(len(self.kinds)))]
            choices.append([Choice(need, cost) for need, cost in zip(needs, costs, strict=True)])
        stock = sum(unit[0].resource for unit in choices)
        taken = sweep(choices, budget.share * stock)
        share = sum(unit[choice].resource for unit, choice in zip(choices, taken, strict=True)) / stock
        if share > budget.share:
            raise InvalidConfigError(
                f"The budget is {budget}, but with {', '.join(map(describe_kind, self.kinds))} in all heads this model needs "
                f"{share:.1%}. Name a larger share, or add a kind that needs less."
            )
        chosen: list[Heads] = [{} for _ in self.kinds]
        for (layer, heads), choice in zip(units, taken, strict=True):
            if choice:
                chosen[choice - 1].setdefault(layer, []).extend(heads)
        return chosen

    def share(self, resource: str, length: int, plan: Mapping[Key, Sequence[SynthesizerConfig | None]]) -> float:
        """What the heads of a plan need of a resource, relative to stock. None stands for a stock head."""
        self._require_resource(resource, length)
        need = stock = 0
        for layer, configs in plan.items():
            shape = self.shapes[layer]
            for first in range(0, len(configs), shape.sharing):
                heads = [STOCK_HEAD if config is None else config for config in configs[first : first + shape.sharing]]
                need += self._need(resource, heads, shape, length)
                stock += self._need(resource, [STOCK_HEAD] * len(heads), shape, length)
        return need / stock

    @staticmethod
    def _need(resource: str, configs: Sequence[SynthesizerConfig], shape: HeadShape, length: int) -> int:
        """What neighbouring heads need. Of the cache, heads that share a key need it once."""
        if resource == CACHE:
            return cached_numbers(configs, shape, length)
        return sum(multiply_adds(config, shape, length) for config in configs)

    def _require_resource(self, resource: str, length: int) -> None:
        """Raise `InvalidConfigError` if nothing can be said of this resource at this length."""
        if resource not in RESOURCES:
            raise InvalidConfigError(f"There is no resource {resource!r}: name one of {', '.join(RESOURCES)}.")
        if not self.shapes:
            raise InvalidConfigError(
                f"This suggestion does not know the sizes of the model's heads, so it cannot tell their {RESOURCES[resource]}. Call "
                f"suggest_heads again, or give a share or a number of heads."
            )
        if resource == CACHE and not any(shape.causal for shape in self.shapes.values()):
            raise InvalidConfigError(
                "This model has no causal layer, and so no cache. Give a budget of multiply_adds, or a share or a number of heads."
            )
        longest = min(
            (shape.max_length for shape in self.shapes.values() if shape.max_length is not None), default=length
        )
        for kind in self.kinds:
            ends = longest if kind.lacks_length else kind.max_length
            if ends is not None and ends < length:
                raise InvalidConfigError(
                    f"The budget is for {length:,} tokens, but {describe_kind(kind)} ends at max_length={ends}. Name a "
                    f"shorter length, a longer max_length, or a variant without one, such as relative."
                )


def shape_of(layer: AttentionLayer, model: PreTrainedModel) -> HeadShape:
    """What the resources of a stock layer's heads depend on."""
    module, config = layer.module, config_of(layer, model.config)
    names = find_projection_names(module) or any_projection_names(module)
    window = getattr(
        module, "sliding_window", None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
    )
    return HeadShape(
        in_features(module.get_submodule(names.fused or names.query)),
        head_dim(module),
        query_heads(module) // value_heads(module),
        bool(getattr(module, "is_causal", False)),
        window if is_positive_int(window) else None,
        known_length(config, layer.stack),
    )


def menu_of(variant: Any, options: Mapping[str, Any]) -> list[SynthesizerConfig]:
    """The kinds of heads in a variant or a list of variants: names, configurations or dicts, with these options.

    Raises:
        InvalidConfigError: for an empty menu, or a kind that is named twice or has `heads`.
    """
    one = isinstance(variant, (str, SynthesizerConfig, Mapping)) or not isinstance(variant, Iterable)
    menu = [_kind(entry).replace(**options) for entry in ([variant] if one else variant)]
    if not menu:
        raise InvalidConfigError("The menu of variants is empty: name at least one, such as 'relative'.")
    for number, kind in enumerate(menu):
        if kind in menu[:number]:
            raise InvalidConfigError(f"The menu names {describe_kind(kind)} twice. Name each kind of heads once.")
        if kind.heads is not None:
            raise InvalidConfigError(
                f"{describe_kind(kind)} names heads={list(kind.heads)}, but suggest_heads chooses the heads. Leave them out."
            )
    return menu


def _kind(entry: Any) -> SynthesizerConfig:
    if isinstance(entry, SynthesizerConfig):
        return entry
    return SynthesizerConfig.from_dict(entry) if isinstance(entry, Mapping) else SynthesizerConfig(entry)


def describe_kind(kind: SynthesizerConfig) -> str:
    """A kind of heads in one line: `dot_product (window=64)`."""
    options = ", ".join(f"{name}={value}" for name, value in kind.non_default().items() if name != "heads")
    return f"{kind.variant} ({options})" if options else kind.variant


def letter_of(number: int) -> str:
    """The letter of a kind of heads in a picture of text."""
    return string.ascii_letters[number % len(string.ascii_letters)]
