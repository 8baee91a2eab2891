"""`SynthesizerConfig`: what a synthesized attention layer is made of, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from ..errors import InvalidConfigError, did_you_mean
from .registry import split_variant, variant_options

MIXINGS = ("softmax", "sum")
INITS = ("default", "handcrafted")
LARGEST = {"max_length": 2**31 - 1, "rank": 8_192, "stride": 2**31 - 1, "bucket_size": 2**31 - 1, "num_hashes": 1_024}
"""What an option may be at most: far more than is of use, and little enough to be counted and, for tables, allocated."""


@dataclass(frozen=True)
class SynthesizerConfig:
    """The recipe of one layer's attention logits.

    Args:
        variant: a registered name, or a mixture `a+b[+c]` of them (see `list_variants()`).
        max_length: the number N of positions the logits are built for; None means the model's own maximum.
        mixing: how the parts of a mixture are weighted: `"softmax"` (the paper's: the weights of a head sum to 1) or
            `"sum"` (weights start at 1 and new parts at 0, so that a model that keeps `dot_product` starts as it was).
        share_heads: whether all heads share the position tables.
        rank: the rank k of `factorized_random`.
        factors: the pair (a, b) of `factorized_dense`, a·b ≥ N; None means the divisor pair of N nearest a square.
        init: `"default"` (near-uniform attention) or `"handcrafted"` (patterns in the first seven heads of `random`).
        stride: the l of `sparse_strided` and `sparse_fixed`; None means √L of each sequence, in a decoder √N.
        bucket_size: how many keys a query chooses in `lsh_simple` and the `alsh_` variants.
        num_hashes: how many hashes they look them up with; more find better keys, and cost more.
        qnf: whether `alsh_xbox` and `alsh_sign` normalise queries before hashing.
        heads: which heads of the layer are made so, counted from 0; the others keep the stock attention. None means all.
        options: what a registered variant declares beyond these.

    Raises:
        InvalidConfigError: for a value out of range, or an option that the variant does not use.
        UnknownVariantError: for a variant that is not registered.
    """

    variant: str
    max_length: int | None = None
    mixing: str = "softmax"
    share_heads: bool = False
    rank: int = 8
    factors: tuple[int, int] | None = None
    init: str = "default"
    stride: int | None = None
    bucket_size: int = 32
    num_hashes: int = 4
    qnf: bool = False
    heads: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        parts = split_variant(self.variant)
        object.__setattr__(self, "variant", "+".join(parts))
        if self.factors is not None:
            object.__setattr__(self, "factors", _factor_pair(self.factors))
        if self.heads is not None:
            object.__setattr__(self, "heads", _head_numbers(self.heads))
        _require(isinstance(self.options, Mapping), "options", self.options, "a dict")
        object.__setattr__(self, "options", dict(self.options))
        for name, most in LARGEST.items():
            value = getattr(self, name)
            if value is not None or name in ("rank", "bucket_size", "num_hashes"):
                _require(_positive(value), name, value, "a positive int")
                _require(value <= most, name, value, f"at most {most:,}")
                object.__setattr__(self, name, int(value))  # what NumPy counts has to be written as JSON, too
        _require(isinstance(self.qnf, bool), "qnf", self.qnf, "True or False")
        _require(isinstance(self.share_heads, bool), "share_heads", self.share_heads, "True or False")
        _require(self.mixing in MIXINGS, "mixing", self.mixing, " or ".join(map(repr, MIXINGS)))
        _require(self.init in INITS, "init", self.init, " or ".join(map(repr, INITS)))
        used = variant_options(self.variant) | {"heads"}
        for key, value in self.non_default().items():
            if key not in used:
                raise InvalidConfigError(
                    f"{key}={value!r} has no meaning for the variant {self.variant!r}, which knows: "
                    f"{', '.join(sorted(used))}. Leave {key} out, or choose a variant that uses it."
                )
        if self.factors and self.max_length and self.factors[0] * self.factors[1] < self.max_length:
            a, b = self.factors
            raise InvalidConfigError(
                f"factors=({a}, {b}) give a·b = {a * b} columns, but max_length = {self.max_length} positions need as "
                f"many. Choose a and b with a·b ≥ {self.max_length}, or leave factors out."
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the mixture's parts; one name for a variant that is no mixture."""
        return tuple(self.variant.split("+"))

    def non_default(self) -> dict[str, Any]:
        """The options that differ from their defaults, variant and max_length left out."""
        named = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("variant", "max_length", "options") and getattr(self, f.name) != f.default
        }
        return {**named, **self.options}

    def replace(self, **changes: Any) -> SynthesizerConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def for_length(self, max_length: int) -> SynthesizerConfig:
        """With this `max_length`, where none is named."""
        return self if self.max_length is not None else self.replace(max_length=max_length)

    @classmethod
    def create(cls, variant: str, **kwargs: Any) -> SynthesizerConfig:
        """From keyword arguments, where an option of a registered variant may stand beside the named fields."""
        names = {f.name for f in dataclasses.fields(cls)}
        options = kwargs.pop("options", {})
        _require(isinstance(options, Mapping), "options", options, "a dict")
        options = dict(options)
        for key in [key for key in kwargs if key not in names]:
            allowed = variant_options(variant)
            if key not in allowed:
                raise InvalidConfigError(
                    f"Unknown option {key!r} for the variant {variant!r}. It knows: "
                    f"{', '.join(sorted(allowed | {'max_length'}))}.{did_you_mean(key, names | allowed)}"
                )
            options[key] = kwargs.pop(key)
        return cls(variant, options=options, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only what differs from the defaults, so that a config file stays readable."""
        data = {"variant": self.variant, "max_length": self.max_length, **self.non_default()}
        for name in ("factors", "heads"):
            if getattr(self, name) is not None:
                data[name] = list(getattr(self, name))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SynthesizerConfig:
        """The inverse of `to_dict`; an unknown key raises."""
        if not isinstance(data, Mapping) or "variant" not in data:
            raise InvalidConfigError(f"A synthesizer configuration is a dict with a 'variant'; found {data!r}.")
        return cls.create(**data)


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
        lengths = [group.max_length for group in self.groups]
        return None if None in lengths else min(lengths)  # type: ignore[type-var]

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


def _positive(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _factor_pair(value: Any) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    _require(len(pair) == 2 and all(map(_positive, pair)), "factors", value, "a pair (a, b) of positive ints")
    return int(pair[0]), int(pair[1])


def _head_numbers(value: Any) -> tuple[int, ...]:
    allowed = "a list of heads, counted from 0, each once, such as [0, 1, 5]"
    _require(isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)), "heads", value, allowed)
    numbers = list(value)
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in numbers)
    _require(bool(numbers) and whole and len(set(numbers)) == len(numbers), "heads", value, allowed)
    return tuple(sorted(int(number) for number in numbers))


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise InvalidConfigError(f"{name} must be {allowed}, not {value!r}.")
