"""Reads the code of a stock forward: which names it uses, in nested and wrapped functions too."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

UNREADABLE = "(unreadable)"
"""In place of a name that the code does not say: a computed attribute, or no Python code at all."""
_SAME = ("transformers.utils.",)
"""Modules whose decorators (deprecated names of arguments, kernels) do not change what a forward computes."""
_NAMES: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def names_used(stock: type[nn.Module]) -> frozenset[str]:
    """All names of globals and attributes in the code of a class's forward, and names passed to `getattr`.

    Its code includes nested functions, lambdas, comprehensions, decorators around it, and functions in their closures.
    """
    forward = stock.forward
    names = _NAMES.get(forward)
    if names is None:
        codes = list(code_of(stock))
        used = frozenset(name for code in codes for name in (*code.co_names, *_attributes(code)))
        _NAMES[forward] = names = used if codes else frozenset({UNREADABLE})
    return names


def code_of(stock: type[nn.Module]) -> Iterator[CodeType]:
    """The code objects that a class's forward is made of."""
    remaining: list[Any] = [stock.forward]
    seen: set[int] = set()
    while remaining:
        part = remaining.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, CodeType):
            yield part
            remaining += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        elif isinstance(part, FunctionType):
            remaining.append(getattr(part, "__wrapped__", None))
            if not str(part.__globals__.get("__name__", "")).startswith(_SAME):
                remaining.append(part.__code__)
                remaining += [_content(cell) for cell in part.__closure__ or ()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _attributes(code: CodeType) -> Iterator[str]:
    """The names in `getattr(object.path, "name")`; `UNREADABLE` for one that is computed."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
    for number, step in enumerate(steps):
        if step.argval != "getattr" or not step.opname.startswith("LOAD_"):
            continue
        _, *rest = steps[number + 1 :]  # what loads the object
        name = next((later for later in rest if later.opname != "LOAD_ATTR"), step)
        known = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
        yield name.argval if known else UNREADABLE


def asks_for_backend(stock: type[nn.Module]) -> bool:
    """Whether a forward reads the name of the attention backend for more than its function.

    Under our name it would do something else. (Sparse attention with an indexer chooses its mask by the name.)
    """
    read = [instruction.argval for code in code_of(stock) for instruction in dis.get_instructions(code)]
    return read.count("_attn_implementation") > read.count("get_interface")


def uses_attention_interface(stock: type[nn.Module]) -> bool:
    """Whether a class hands queries, keys and values to Transformers' attention interface."""
    return hasattr(stock, "forward") and "ALL_ATTENTION_FUNCTIONS" in names_used(stock)
