"""What the code of a stock forward says: which names it uses, however it is nested or wrapped."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

UNREADABLE = "(unreadable)"
"""Stands among the names of a forward where its code does not say one: a computed attribute, or no Python code at all."""
_SAME = ("transformers.utils.",)
"""Modules whose decorators (deprecated names of arguments, kernels) change nothing of what a forward computes."""
_NAMES: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def names_used(stock: type[nn.Module]) -> frozenset[str]:
    """All names, global or of an attribute, in the code of a class's forward: of nested functions, lambdas and
    comprehensions, of decorators around it, and of functions in their closures too; and those that `getattr` is given."""
    forward = stock.forward
    found = _NAMES.get(forward)
    if found is None:
        codes = list(code_of(stock))
        found = frozenset(name for code in codes for name in (*code.co_names, *_attributes(code)))
        _NAMES[forward] = found = found if codes else frozenset({UNREADABLE})
    return found


def code_of(stock: type[nn.Module]) -> Iterator[CodeType]:
    """The code objects that a class's forward is made of."""
    waiting: list[Any] = [stock.forward]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, CodeType):
            yield found
            waiting += [constant for constant in found.co_consts if isinstance(constant, CodeType)]
        elif isinstance(found, FunctionType):
            waiting.append(getattr(found, "__wrapped__", None))
            if not str(found.__globals__.get("__name__", "")).startswith(_SAME):
                waiting.append(found.__code__)
                waiting += [_content(cell) for cell in found.__closure__ or ()]


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
    """Whether a forward does something by the name of the attention backend, beside asking for its function.

    Under ours it would do something else. (Sparse attention that an indexer chooses is masked so.)
    """
    read = [instruction.argval for code in code_of(stock) for instruction in dis.get_instructions(code)]
    return read.count("_attn_implementation") > read.count("get_interface")


def uses_attention_interface(stock: type[nn.Module]) -> bool:
    """Whether a class hands queries, keys and values to Transformers' attention interface."""
    return hasattr(stock, "forward") and "ALL_ATTENTION_FUNCTIONS" in names_used(stock)
