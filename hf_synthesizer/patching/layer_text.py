"""Layers as a command line names them."""

from __future__ import annotations

import re
from typing import Any

from ..errors import InvalidConfigError

MOST_LAYERS = 10_000
"""In one range of a command line: more than any model has, and few enough to be listed."""


def parse_layers(text: str | None) -> list[int] | dict[str, Any] | None:
    """Layers as a command line names them: `"0-3,5"` → `[0, 1, 2, 3, 5]`; `"encoder,decoder.0-1"` →
    `{"encoder": True, "decoder": [0, 1]}`; None → None, all of them.

    Raises:
        InvalidConfigError: for anything else.
    """
    if text is None:
        return None
    indices: list[int] = []
    stacks: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(?:([A-Za-z_]\w*)(?:\.|$))?(?:([0-9]{1,9})(?:-([0-9]{1,9}))?)?", part)
        stack, first, last = match.groups() if match and part else (None, None, None)
        span = int(last or first) - int(first) + 1 if first else 0
        if (stack is None and first is None) or (first and not 1 <= span <= MOST_LAYERS):
            raise InvalidConfigError(
                f"--layers {_shortened(text)}: give indices and ranges such as 0-3,5, of {MOST_LAYERS:,} layers at most, stacks "
                f"such as encoder or decoder.0-3, or 'suggest'."
            )
        numbers = list(range(int(first), int(first) + span)) if first else []
        if stack is None:
            indices += numbers
        elif not numbers or stacks.get(stack) is True:
            stacks[stack] = True
        else:
            stacks[stack] = [*stacks.get(stack, []), *numbers]
    if indices and stacks:
        raise InvalidConfigError(
            f"--layers {_shortened(text)} names some layers with their stack and others without: name it for all."
        )
    return stacks or indices


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"
