"""The registry of variants: the single source for names, options, formulas, tests and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import InvalidConfigError, UnknownVariantError, did_you_mean
from .options import SINKS, WINDOW, Option

if TYPE_CHECKING:
    from .base import Synthesizer

    Registered = TypeVar("Registered", bound=type[Synthesizer])

MIXING = Option("softmax", "how the parts of a mixture are weighted", choices=("softmax", "sum"))
"""The option of mixtures."""

SHARED_FIELDS = {"variant", "max_length", "mixing", "heads", "options", "window", "sinks"}
"""The fields of `SynthesizerConfig` that no variant declares."""
_VARIANTS: dict[str, type[Synthesizer]] = {}


def register_variant(name: str) -> Callable[[Registered], Registered]:
    """Class decorator: register a `Synthesizer` subclass under `name`, for `patch_model` and for mixtures.

    Raises:
        InvalidConfigError: for a name that is taken, or that is no identifier; for an option that every variant has.
    """
    if not name.isidentifier():
        raise InvalidConfigError(f"A variant's name must be an identifier such as 'my_variant', not {name!r}.")

    def register(cls: Registered) -> Registered:
        registered = _VARIANTS.get(name)
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise InvalidConfigError(f"The variant {name!r} is registered already, by {registered.__qualname__}.")
        for option in SHARED_FIELDS & cls.options.keys():
            raise InvalidConfigError(f"Every variant has {option!r}: give this option of {name!r} another name.")
        cls.variant = name
        _VARIANTS[name] = cls
        return cls

    return register


def list_variants() -> list[str]:
    """The names of all registered variants. Variants that do not choose keys can be mixed: `"random+dot_product"`."""
    return list(_VARIANTS)


def get_variant(name: str) -> type[Synthesizer]:
    """Return the class registered under `name`. Mixtures are not registered."""
    if name not in _VARIANTS:
        raise UnknownVariantError(
            f"Unknown variant {name!r}. Known are {', '.join(_VARIANTS)}, and mixtures of them such as "
            f"'random+dot_product'.{did_you_mean(name, _VARIANTS)}"
        )
    return _VARIANTS[name]


def split_variant(variant: str) -> list[str]:
    """Split `"a+b+c"` into its parts, and check each.

    Raises:
        UnknownVariantError: for an unknown or an empty part.
        InvalidConfigError: for a part named twice, or one that cannot be mixed.
    """
    if not isinstance(variant, str):
        raise UnknownVariantError(f"A variant is a string such as 'dense' or 'random+dot_product', not {variant!r}.")
    parts = [part.strip() for part in variant.split("+")]
    for part in parts:
        get_variant(part)
    if len(set(parts)) != len(parts):
        raise InvalidConfigError(f"The mixture {variant!r} names a part twice; name each part once.")
    choosing = [part for part in parts if get_variant(part).chooses_keys]
    if choosing and len(parts) > 1:
        raise InvalidConfigError(
            f"{choosing[0]!r} chooses which keys a query attends to, and cannot be added to other logits in the mixture "
            f"{variant!r}. Give it layers of its own: patch_model(model, {{0: {choosing[0]!r}, 1: 'random'}})."
        )
    return parts


def variant_options(variant: str) -> dict[str, Option]:
    """The options that a variant, or some part of a mixture, declares.

    Raises:
        InvalidConfigError: for a mixture whose parts declare different options under one name.
    """
    parts = split_variant(variant)
    options: dict[str, Option] = {"mixing": MIXING} if len(parts) > 1 else {}
    if not get_variant(parts[0]).chooses_keys:
        options |= {"window": WINDOW, "sinks": SINKS}
    for part in parts:
        for name, option in get_variant(part).options.items():
            if options.setdefault(name, option) != option:
                raise InvalidConfigError(
                    f"The parts of the mixture {variant!r} declare different options under the name {name!r}. Mix other "
                    f"variants, or rename the option of one."
                )
    return options
