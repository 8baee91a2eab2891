"""A suggestion as text: tables of costs, and a picture of layers × heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .budgets import RESOURCES, ResourceBudget
from .head_menu import describe_kind, letter_of

if TYPE_CHECKING:
    from .suggestion import Suggestion

SHADES = " ░▒▓█"
"""From the cheapest head to the most expensive one."""


def layer_lines(suggestion: Suggestion) -> list[str]:
    """The costs of whole layers, in the order of choice."""
    costs, total = suggestion.costs, suggestion.total
    header = f"{'layer':14}{'swapped alone':>15}{'with the earlier':>18}  suggestion"
    lines = [header, "-" * len(header)]
    for label in sorted(costs, key=lambda label: total.get(label, math.inf)):
        together = f"{total[label]:.4f}" if label in total else ""
        verdict = "synthesize" if label in total else "leave stock"
        lines.append(f"{label:14}{costs[label]:>15.4f}{together:>18}  {verdict}")
    return lines


def head_lines(suggestion: Suggestion) -> list[str]:
    """Which heads are synthesized, what each head costs, a picture, and the measured changes."""
    heads, all_heads = suggestion.heads, suggestion.num_heads
    kinds, menu = suggestion.heads_by_kind, bool(suggestion.menu)
    lines = _menu_summary(suggestion) if menu else _summary(suggestion)
    budget = suggestion.budget
    if isinstance(budget, ResourceBudget):
        share = suggestion.share(budget.resource, budget.length)
        lines.append(f"together {share:.1%} of stock's {RESOURCES[budget.resource]} at {budget.length:,} tokens")
    cheapest = ", for its cheapest kind" if menu else ""
    lines += ["", f"{'layer':>12}  {'synthesized':24}  cost of each head alone, in thousandths{cheapest}"]
    for layer, row in suggestion.costs.items():
        if menu:
            of_kinds = [(letter_of(number), by_layer.get(layer, ())) for number, by_layer in enumerate(kinds.values())]
            others = [f"{letter}:{len(of_kind)}" for letter, of_kind in of_kinds if of_kind]
        else:
            others = sorted(
                {config.variant for config in suggestion.configs(layer)} - {suggestion.head_menu.kinds[0].variant}
            )
        synthesized = " ".join([f"{len(heads[layer])} of {len(row)}", *others])
        lines.append(f"{layer!s:>12}  {synthesized:24}  {' '.join(f'{1000 * cost:.2f}' for cost in row)}")
    lines += ["", picture(suggestion)]
    counts = {count: change for count, change in suggestion.curve.items() if not isinstance(count, ResourceBudget)}
    if counts:
        lines += ["", f"{'heads':>12}  {'share':>6}  change of the answers, heads together"]
        lines += [f"{n:>12}  {n / all_heads:>6.0%}  {change:.4f}" for n, change in sorted(counts.items())]
    resources = {budget: change for budget, change in suggestion.curve.items() if isinstance(budget, ResourceBudget)}
    if resources:
        lines += ["", f"{'resource':>14}  {'length':>9}  {'share':>6}  change of the answers, heads together"]
        lines += [
            f"{b.resource:>14}  {b.length:>9,}  {b.share:>6.1%}  {change:.4f}" for b, change in resources.items()
        ]
    return lines


def _summary(suggestion: Suggestion) -> list[str]:
    number, variant = sum(map(len, suggestion.heads.values())), suggestion.head_menu.kinds[0].variant
    return [
        f"{number} of {suggestion.num_heads} heads get {variant}; {suggestion.num_heads - number} keep stock attention"
    ]


def _menu_summary(suggestion: Suggestion) -> list[str]:
    lines, left = [], suggestion.num_heads
    for number, (kind, by_layer) in enumerate(suggestion.heads_by_kind.items()):
        count = sum(map(len, by_layer.values()))
        lines.append(f"{letter_of(number)}: {count} of {suggestion.num_heads} heads get {describe_kind(kind)}")
        left -= count
    return [*lines, f"{left} of {suggestion.num_heads} heads keep stock attention"]


def picture(suggestion: Suggestion) -> str:
    """Layers × heads. `·`, or with a menu the letter of its kind, is a synthesized head. A darker shade is a higher cost of a stock
    head."""
    kinds, costs, lines = suggestion.heads_by_kind.values(), suggestion.costs, []
    highest = max(map(max, costs.values()), default=0.0) or 1.0
    for layer, row in costs.items():
        cells = [SHADES[1 + min(3, int(4 * math.sqrt(max(cost, 0.0) / highest)))] for cost in row]
        for number, by_layer in enumerate(kinds):
            for head in by_layer.get(layer, ()):
                cells[head] = letter_of(number) if suggestion.menu else "·"
        lines.append(f"{layer!s:>12}  {' '.join(cells)}")
    return "\n".join(lines)
