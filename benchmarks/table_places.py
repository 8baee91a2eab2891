"""Where tables stand in the documents, and how a script writes its own anew, or checks them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def with_tables(text: str, script: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """A document with the tables of a script written anew.

    `<!-- table: NAME (benchmarks/SCRIPT.py) -->` … `<!-- end of table -->` is where the table NAME goes.
    """
    place = re.compile(
        rf"(<!-- table: ([a-z-]+) \(benchmarks/{script}\.py\) -->\n).*?(<!-- end of table -->)", re.DOTALL
    )
    return place.sub(lambda found: f"{found[1]}\n{makers[found[2]]()}\n\n{found[3]}", text)


def write_tables(
    documents: Iterable[Path], script: str, makers: Mapping[str, Callable[[], str]], *, check: bool
) -> None:
    """Write a script's tables into the documents; or, to check, exit where one disagrees."""
    for document in documents:
        text = document.read_text(encoding="utf-8")
        written = with_tables(text, script, makers)
        if check and written != text:
            sys.exit(f"{document.name} and the results disagree: run python benchmarks/{script}.py.")
        document.write_text(written, encoding="utf-8")
