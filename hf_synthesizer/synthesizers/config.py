"""`SynthesizerConfig`: what a synthesized attention layer is made of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from ..errors import InvalidConfigError, did_you_mean
from .options import SINKS, WINDOW, Option, require
from .registry import MIXING, get_variant, list_variants, split_variant, variant_options

MAX_LENGTH = Option(None, "the number N of positions that the logits are built for", kind=int)


@dataclass(frozen=True, init=False)
class SynthesizerConfig:
    """The recipe of one layer's attention logits.

    The options of the variant are arguments and attributes too: `SynthesizerConfig("factorized_random", rank=4).rank`.
    Each variant declares its own (`Synthesizer.options`); `hf-synthesizer variants` lists them.

    Args:
        variant: a registered name, or a mixture `a+b[+c]` of them (see `list_variants()`).
        max_length: the number N of positions the logits are built for. None means the model's own maximum, or no
            longest sequence if the variant needs none.
        mixing: how the parts of a mixture are weighted: `"softmax"` (the paper's: the weights of a head sum to 1) or
            `"sum"` (weights start at 1 and new parts at 0, so that a model that keeps `dot_product` starts as it was).
        heads: the heads of the layer with these logits, counted from 0; the others stay stock. None means all.
        options: options of the variant as a dict, beside those that are named.
        **named_options: options of the variant.

    Raises:
        InvalidConfigError: for a value out of range, or an option that the variant does not use.
        UnknownVariantError: for a variant that is not registered.
    """

    variant: str
    max_length: int | None
    mixing: str
    heads: tuple[int, ...] | None
    options: dict[str, Any] = field(hash=False)
    """The value of each option that the variant declares."""

    def __init__(
        self,
        variant: str,
        max_length: int | None = None,
        *,
        mixing: str = MIXING.default,
        heads: Iterable[int] | None = None,
        options: Mapping[str, Any] | None = None,
        **named_options: Any,
    ):
        parts = split_variant(variant)
        declared = variant_options(variant)
        require(options is None or isinstance(options, Mapping), "options", options, "a dict")
        values = {name: option.default for name, option in declared.items()}
        values |= _known_values(variant, {**(options or {}), **named_options, "mixing": mixing})
        values = {name: declared[name].convert(name, value) for name, value in values.items()}
        settings = {
            "variant": "+".join(parts),
            "max_length": MAX_LENGTH.convert("max_length", max_length),
            "mixing": values.pop("mixing", MIXING.default),
            "heads": None if heads is None else _head_numbers(heads),
            "options": values,
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)
        if values.get("sinks", SINKS.default) != SINKS.default and values["window"] is None and not self.has_distances:
            raise InvalidConfigError(
                f"sinks={values['sinks']!r} has no meaning for the variant {self.variant!r} without a window. Add window=…, or "
                f"leave sinks out."
            )
        for part in parts:
            get_variant(part).require_options(self)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name not in options:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return options[name]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the mixture's parts; one name for a variant that is no mixture."""
        return tuple(self.variant.split("+"))

    @property
    def has_distances(self) -> bool:
        """Whether a part has logits by distance, which have sinks without a window too."""
        return any("max_distance" in get_variant(part).options for part in self.parts)

    @property
    def takes_any_length(self) -> bool:
        """Whether the logits need no `max_length`."""
        return all(get_variant(part).has_any_length for part in self.parts)

    @property
    def lacks_length(self) -> bool:
        """Whether the logits need a `max_length`, and none is named."""
        return self.max_length is None and not self.takes_any_length

    def non_default(self) -> dict[str, Any]:
        """The options that differ from their defaults, variant and max_length left out."""
        declared = variant_options(self.variant)
        values = {"mixing": self.mixing, **self.options}
        changed = {
            name: value for name, value in values.items() if name in declared and value != declared[name].default
        }
        return changed if self.heads is None else {**changed, "heads": self.heads}

    def replace(self, **changes: Any) -> SynthesizerConfig:
        """A copy with some fields or options changed."""
        return SynthesizerConfig(**{**self.to_dict(), **changes})

    def for_length(self, max_length: int) -> SynthesizerConfig:
        """With this `max_length`, where none is named."""
        return self.replace(max_length=max_length) if self.lacks_length else self

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only what differs from the defaults, so that a config file stays readable."""
        data = {"variant": self.variant, "max_length": self.max_length, **self.non_default()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SynthesizerConfig:
        """The inverse of `to_dict`; an unknown key raises."""
        if not isinstance(data, Mapping) or "variant" not in data:
            raise InvalidConfigError(f"A synthesizer configuration is a dict with a 'variant'; found {data!r}.")
        return cls(**data)


def _known_values(variant: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that the variant declares. Options of other variants may be there with their defaults."""
    declared = variant_options(variant)
    elsewhere = {"mixing": MIXING, "window": WINDOW, "sinks": SINKS}
    for name in list_variants():
        elsewhere.update(get_variant(name).options)
    for name, value in values.items():
        if name not in declared and name not in elsewhere:
            raise InvalidConfigError(
                f"Unknown option {name!r} for the variant {variant!r}. It knows: "
                f"{', '.join(sorted({*declared, 'max_length'}))}.{did_you_mean(name, {*declared, *elsewhere, 'max_length', 'heads'})}"
            )
        if name not in declared and elsewhere[name].convert(name, value) != elsewhere[name].default:
            raise InvalidConfigError(
                f"{name}={value!r} has no meaning for the variant {variant!r}, which knows: "
                f"{', '.join(sorted({*declared, 'heads'}))}. Leave {name} out, or choose a variant that uses it."
            )
    return {name: value for name, value in values.items() if name in declared}


@dataclass(frozen=True)
class HeadGroupsConfig:
    """The recipe of a layer whose heads differ: disjoint groups of heads, each made its own way.

    Args:
        groups: a configuration with `heads` for each group; here they are in the order of their first heads.
        num_heads: the number H of heads of the layer. Those that no group names keep the stock attention.

    Raises:
        InvalidConfigError: for a head that the layer does not have, that two groups name, or groups without heads.
    """

    groups: tuple[SynthesizerConfig, ...]
    num_heads: int

    def __post_init__(self) -> None:
        seen: dict[int, SynthesizerConfig] = {}
        for group in self.groups:
            if group.heads is None:
                raise InvalidConfigError(
                    f"Of several groups of heads in one layer, {group.variant!r} does not say which are its own. Name them: "
                    f"SynthesizerConfig({group.variant!r}, heads=[…])."
                )
            for head in group.heads:
                if head >= self.num_heads:
                    raise InvalidConfigError(
                        f"heads={list(group.heads)} of {group.variant!r} names head {head}, but the layer has "
                        f"{self.num_heads}, 0 to {self.num_heads - 1}."
                    )
                if head in seen:
                    raise InvalidConfigError(
                        f"Head {head} is named twice in one layer: by {seen[head].variant!r} and by {group.variant!r}. Give "
                        f"each head to one group."
                    )
                seen[head] = group
        object.__setattr__(self, "groups", tuple(sorted(self.groups, key=lambda group: group.heads or ())))

    @property
    def stock_heads(self) -> tuple[int, ...]:
        """The heads that no group names."""
        named = {head for group in self.groups for head in group.heads or ()}
        return tuple(head for head in range(self.num_heads) if head not in named)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all that makes logits in the layer, `dot_product` where some heads keep the stock attention."""
        names = [part for group in self.groups for part in group.parts]
        return tuple(dict.fromkeys([*names, *(["dot_product"] if self.stock_heads else [])]))

    @property
    def variant(self) -> str:
        """How reports call it: `random [0-2, 5]; dense [3]`."""
        return "; ".join(f"{group.variant} [{ranges(group.heads or ())}]" for group in self.groups)

    @property
    def max_length(self) -> int | None:
        """The longest sequence that all groups can take."""
        return min((group.max_length for group in self.groups if group.max_length is not None), default=None)

    @property
    def takes_any_length(self) -> bool:
        """Whether no group needs a `max_length`."""
        return all(group.takes_any_length for group in self.groups)

    @property
    def lacks_length(self) -> bool:
        """Whether a group needs a `max_length`, and none is named."""
        return any(group.lacks_length for group in self.groups)

    def non_default(self) -> dict[str, Any]:
        """The options that differ from their defaults, and which heads are synthesized."""
        named: dict[str, Any] = {}
        for group in self.groups:
            named |= {key: value for key, value in group.non_default().items() if key != "heads"}
        return {**named, "stock_heads": ranges(self.stock_heads) or "none"}

    def for_length(self, max_length: int) -> HeadGroupsConfig:
        """With this `max_length`, where a group names none."""
        return HeadGroupsConfig(tuple(group.for_length(max_length) for group in self.groups), self.num_heads)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"groups": [group.to_dict() for group in self.groups]}


LayerConfig = SynthesizerConfig | HeadGroupsConfig
"""What one layer is made of."""


def layer_config(asked: SynthesizerConfig | Sequence[SynthesizerConfig] | LayerConfig, num_heads: int) -> LayerConfig:
    """The configuration of a layer with so many heads. One group that has all of them is the plain variant.

    Raises:
        InvalidConfigError: for heads that cannot be (`HeadGroupsConfig`).
    """
    if isinstance(asked, HeadGroupsConfig) or (isinstance(asked, SynthesizerConfig) and asked.heads is None):
        return asked
    groups = HeadGroupsConfig((asked,) if isinstance(asked, SynthesizerConfig) else tuple(asked), num_heads)
    alone = len(groups.groups) == 1 and not groups.stock_heads
    return groups.groups[0].replace(heads=None) if alone else groups


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _head_numbers(value: Any) -> tuple[int, ...]:
    allowed = "a list of heads, counted from 0, each once, such as [0, 1, 5]"
    require(isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)), "heads", value, allowed)
    numbers = list(value)
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in numbers)
    require(bool(numbers) and whole and len(set(numbers)) == len(numbers), "heads", value, allowed)
    return tuple(sorted(int(number) for number in numbers))
