"""Budgets of a suggestion: a share or a number of layers or heads, or a share of the stock cache or multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import InvalidConfigError
from ..synthesizers.options import is_positive_int

CACHE, MULTIPLY_ADDS = "cache", "multiply_adds"
RESOURCES = {CACHE: "bytes of the cache", MULTIPLY_ADDS: "multiply-adds of attention"}


@dataclass(frozen=True, order=True)
class ResourceBudget:
    """At most this share of what stock attention needs of a resource for a sequence of `length` tokens."""

    resource: str
    share: float
    length: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ResourceBudget:
        """Read `{"cache": 0.3, "length": 8192}` or `{"multiply_adds": 0.5, "length": 2048}`.

        Raises:
            InvalidConfigError: for anything else.
        """
        share = next((data[name] for name in RESOURCES if name in data), None)
        one_resource = len(set(data) & set(RESOURCES)) == 1 and set(data) <= {*RESOURCES, "length"}
        if not one_resource or not is_positive_int(data.get("length")) or not _is_share(share) or share == 1:
            raise InvalidConfigError(
                f"budget={dict(data)!r} is not allowed: a dict names one of {' and '.join(RESOURCES)} with a share below 1 of what "
                f"stock attention needs, and a length in tokens, such as {{'cache': 0.3, 'length': 8192}}."
            )
        (resource,) = set(data) & set(RESOURCES)
        return cls(resource, float(data[resource]), int(data["length"]))

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` and `from_dict` accept."""
        return {self.resource: self.share, "length": self.length}

    def __str__(self) -> str:
        return f"{self.share:.1%} of stock's {RESOURCES[self.resource]} at {self.length:,} tokens"


Budget = float | int | ResourceBudget | Mapping[str, Any]


def read_budget(budget: Any) -> Any:
    """A `ResourceBudget` in place of a dict. Anything else comes back as it is."""
    return ResourceBudget.from_dict(budget) if isinstance(budget, Mapping) else budget


def count_of(budget: Any, available: int, unit: str) -> int:
    """The number of layers or heads in a budget: a share in (0, 1] (a float), or a number (an int).

    Raises:
        InvalidConfigError: for a budget out of range.
    """
    is_number = isinstance(budget, Integral) and not isinstance(budget, bool)
    count = int(budget) if is_number else math.ceil(budget * available - 1e-9) if _is_share(budget) else 0
    if not 1 <= count <= available:
        raise InvalidConfigError(
            f"budget must be a share of the {unit} in (0, 1] or a number of {unit} from 1 to {available}, not {budget!r}."
        )
    return count


def budgets_of(budget: Budget | Iterable[Budget]) -> list[Any]:
    """A list of one or several budgets."""
    several = isinstance(budget, Iterable) and not isinstance(budget, (str, Mapping))
    budgets = [read_budget(one) for one in (budget if several else [budget])]  # type: ignore[union-attr]
    if not budgets:
        raise InvalidConfigError("budget is an empty list: name at least one share or number of heads.")
    return budgets


def _is_share(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= 1
