"""The cheapest choices under a limit of some resource, by a sweep over the price of the resource."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """What one choice needs of the resource, and what it costs."""

    resource: float
    cost: float


class Step(NamedTuple):
    """A unit takes a choice that needs less. `price` is the cost it adds for each saved unit of the resource."""

    price: float
    unit: int
    number: int
    choice: int


def sweep(units: Sequence[Sequence[Choice]], limit: float) -> list[int]:
    """For each unit the number of its choice, so that all together need at most `limit`, if they can.

    At a price λ each unit takes the choice of least cost + λ · resource. As λ grows, units take one step after the other, each
    to a choice that needs less. So the plans are nested: a smaller limit takes the same steps and some more. A plan is the
    cheapest of all that need no more than it does (Everett 1963). The sweep ends at the first plan within the limit. It may need
    less than the limit: a cheaper plan between two plans of the sweep is not looked for.

    Every unit starts with its first choice.
    """
    taken = [0] * len(units)
    steps = sorted(step for unit, choices in enumerate(units) for step in _steps(unit, choices))
    for step in steps:
        if sum(choices[number].resource for choices, number in zip(units, taken, strict=True)) <= limit:
            break
        taken[step.unit] = step.choice
    return taken


def _steps(unit: int, choices: Sequence[Choice]) -> Iterator[Step]:
    """The steps along the lower convex hull of a unit's choices, from its first choice on. Their prices grow."""
    present, price, number = 0, 0.0, 0
    while True:
        less = [
            (choice.cost - choices[present].cost) / (choices[present].resource - choice.resource)
            if choice.resource < choices[present].resource
            else None
            for choice in choices
        ]
        prices = [(found, choices[index].resource, index) for index, found in enumerate(less) if found is not None]
        if not prices:
            return
        found, _, present = min(prices)
        price, number = max(price, found), number + 1
        yield Step(price, unit, number, present)
