"""`SynthesizerConfig`: what a synthesized attention layer is made of, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from .errors import InvalidConfigError, did_you_mean

MIXINGS = ("softmax", "sum")
INITS = ("default", "handcrafted")


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
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        from .synthesizers.registry import split_variant, variant_options

        parts = split_variant(self.variant)
        object.__setattr__(self, "variant", "+".join(parts))
        if self.factors is not None:
            object.__setattr__(self, "factors", _factor_pair(self.factors))
        _require(isinstance(self.options, Mapping), "options", self.options, "a dict")
        object.__setattr__(self, "options", dict(self.options))
        _require(
            self.max_length is None or _positive(self.max_length), "max_length", self.max_length, "a positive int"
        )
        _require(_positive(self.rank), "rank", self.rank, "a positive int")
        _require(self.stride is None or _positive(self.stride), "stride", self.stride, "a positive int")
        _require(_positive(self.bucket_size), "bucket_size", self.bucket_size, "a positive int")
        _require(_positive(self.num_hashes), "num_hashes", self.num_hashes, "a positive int")
        for name in (
            "max_length",
            "rank",
            "stride",
            "bucket_size",
            "num_hashes",
        ):  # what NumPy counts has to be written as JSON, too
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        _require(isinstance(self.qnf, bool), "qnf", self.qnf, "True or False")
        _require(isinstance(self.share_heads, bool), "share_heads", self.share_heads, "True or False")
        _require(self.mixing in MIXINGS, "mixing", self.mixing, " or ".join(map(repr, MIXINGS)))
        _require(self.init in INITS, "init", self.init, " or ".join(map(repr, INITS)))
        used = variant_options(self.variant)
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

    @classmethod
    def create(cls, variant: str, **kwargs: Any) -> SynthesizerConfig:
        """From keyword arguments, where an option of a registered variant may stand beside the named fields."""
        from .synthesizers.registry import variant_options

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
        if self.factors is not None:
            data["factors"] = list(self.factors)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SynthesizerConfig:
        """The inverse of `to_dict`; an unknown key raises."""
        if not isinstance(data, Mapping) or "variant" not in data:
            raise InvalidConfigError(f"A synthesizer configuration is a dict with a 'variant'; found {data!r}.")
        return cls.create(**data)


def _positive(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _factor_pair(value: Any) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    _require(len(pair) == 2 and all(map(_positive, pair)), "factors", value, "a pair (a, b) of positive ints")
    return int(pair[0]), int(pair[1])


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise InvalidConfigError(f"{name} must be {allowed}, not {value!r}.")
