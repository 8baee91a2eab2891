"""`Option`: how a variant declares one of its options."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import InvalidConfigError

LARGEST = 2**31 - 1
"""The largest number of tokens that can be counted."""


@dataclass(frozen=True)
class Option:
    """An option of a variant: its default, its meaning and its allowed values.

    The type of the default tells which values are allowed: True or False, a positive int, a number, a string, or any
    other type that JSON has.

    Args:
        default: the value if the user names none.
        help: one line that says what the option does.
        kind: the type of the values, if the default is None. `tuple` stands for a pair of positive ints.
        least: the smallest allowed number of an int.
        most: the largest allowed number.
        choices: the allowed strings.
        in_fingerprint: whether other values make another function of the same weights. False for an option that only
            sets the first weights.
    """

    default: Any
    help: str
    kind: type | None = None
    least: int = 1
    most: float = LARGEST
    choices: tuple[str, ...] = ()
    in_fingerprint: bool = True

    def convert(self, name: str, value: Any) -> Any:
        """Return the value as plain Python, so that it can be written as JSON.

        Raises:
            InvalidConfigError: for a value that is not allowed; `name` is the option's name.
        """
        kind = self.kind or type(self.default)
        if value is None and self.default is None:
            return None
        if kind is bool:
            require(isinstance(value, bool), name, value, "True or False")
        elif kind is str:
            allowed = " or ".join(map(repr, self.choices)) or "a string"
            require(isinstance(value, str) and value in (self.choices or (value,)), name, value, allowed)
        elif kind is tuple:
            pair = tuple(value) if isinstance(value, (tuple, list)) else ()
            allowed = "a pair (a, b) of positive ints"
            require(len(pair) == 2 and all(map(is_positive_int, pair)), name, value, allowed)
            return tuple(map(int, pair))
        elif kind in (int, float):
            is_number = (
                is_int(value) and int(value) >= self.least
                if kind is int
                else isinstance(value, Real) and not isinstance(value, bool)
            )
            ints = "a positive int" if self.least == 1 else f"an int from {self.least} on"
            require(is_number, name, value, ints if kind is int else "a number")
            require(value <= self.most, name, value, f"at most {self.most:,}")
            return kind(value)
        else:
            require(isinstance(value, kind), name, value, f"a {kind.__name__}")
        return value


WINDOW = Option(None, "a query sees the keys less than so many places away; None for all keys", kind=int)
SINKS = Option(
    4,
    "the number of first tokens that every query sees through a window, and that have logits of their own in "
    "variants by distance",
    least=0,
    most=1_024,
)
SHARE_HEADS = Option(False, "whether all heads share one table or one set of columns")


def is_int(value: Any) -> bool:
    """Whether it is an int or a NumPy integer."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_positive_int(value: Any) -> bool:
    """Whether it is an int or a NumPy integer of at least 1."""
    return is_int(value) and int(value) > 0


def require(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Raise `InvalidConfigError` unless the condition holds."""
    if not holds:
        raise InvalidConfigError(f"{name} must be {allowed}, not {value!r}.")
