"""Where tables stand in the documents, and how a module of this folder writes its own anew, or checks them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Makers = Mapping[str, Callable[[], str]]
"""By name, what makes a table."""


def table_names(text: str, module: str) -> list[str]:
    """The tables of a module that stand in a document."""
    return [found[2] for found in _place(module).finditer(text)]


def with_tables(text: str, module: str, makers: Makers) -> str:
    """A document with the tables of a module written anew.

    `<!-- table: NAME (benchmarks/report/MODULE.py) -->` … `<!-- end of table -->` is where the table NAME goes.
    """

    def write(found: re.Match[str]) -> str:
        if found[2] not in makers:
            sys.exit(f"There is no table {found[2]!r}; there are: {', '.join(makers)}.")
        return f"{found[1]}\n{makers[found[2]]()}\n\n{found[3]}"

    return _place(module).sub(write, text)


def write_tables(documents: Iterable[Path], module: str, makers: Makers, *, check: bool) -> None:
    """Write a module's tables into the documents; or, to check, exit where one disagrees."""
    for document in documents:
        text = document.read_text(encoding="utf-8")
        written = with_tables(text, module, makers)
        if check and written != text:
            sys.exit(f"{document.name} and the results disagree: run python -m benchmarks.report.{module}.")
        document.write_text(written, encoding="utf-8")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command line that these modules share; some add their own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document disagrees")
    return parser


def _place(module: str) -> re.Pattern[str]:
    return re.compile(
        rf"(<!-- table: ([a-z0-9_-]+) \(benchmarks/report/{module}\.py\) -->\n).*?(<!-- end of table -->)", re.DOTALL
    )
