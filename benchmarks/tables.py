#!/usr/bin/env python
"""Writes the README's speed table from benchmarks/results, between two comments of the README.

python benchmarks/tables.py            # writes it
python benchmarks/tables.py --check    # only says whether README and results agree
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from records import RESULTS, ROOT, Row, read

BEGIN, END = "<!-- speed table: written by benchmarks/tables.py -->", "<!-- end of the speed table -->"
CELLS = (("128", "8"), ("512", "8"), ("2048", "2"))


def measured(rows: list[Row], mode: str, padding: str, dtype: str = "float32") -> dict[tuple[str, str, str], Row]:
    """What was measured without dropout, by variant, length and batch size."""
    return {
        (row["variant"], row["length"], row["batch_size"]): row
        for row in rows
        if row["status"] == "ok"
        and (row["mode"], row["padding"], row["dtype"], row["dropout"]) == (mode, padding, dtype, "0.0")
    }


def speed_table(rows: list[Row]) -> str:
    """Speed of one attention block relative to stock SDPA: inference, with and without padding, and training."""
    columns = [
        (f"{title} {length}", found, length, batch_size)
        for title, mode, padding in (
            ("inference", "inference", "none"),
            ("ragged", "inference", "ragged"),
            ("training", "train", "none"),
        )
        for found in [measured(rows, mode, padding)]
        for length, batch_size in CELLS
        if any(key[1:] == (length, batch_size) for key in found)
    ]
    lines = [
        "| attention | " + " | ".join(title for title, *_ in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = [
            f"{float(found[name, length, batch_size]['speedup']):.2f}" if (name, length, batch_size) in found else ""
            for _, found, length, batch_size in columns
        ]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    used = [
        row
        for _, found, length, batch_size in columns
        for key, row in found.items()
        if key[1:] == (length, batch_size)
    ]
    return "\n".join([*lines, "", provenance_line(used)])


def provenance_line(rows: list[Row]) -> str:
    """Where the numbers come from."""

    def of(name: str) -> str:
        return ", ".join(sorted({row[name] for row in rows}))

    return (
        f"Times as fast as stock SDPA in the same interleaved run; one attention block (width 768, 12 heads), float32, "
        f"batch 8 (2 at 2048), medians. {of('cpu')}, {of('threads')} threads, torch {of('torch')}, transformers "
        f"{of('transformers')}, commit {of('commit')}, {of('date')}. `floor`: value and output projections and one product "
        f"with ready-made weights. From `benchmarks/results/attention.csv`."
    )


def with_table(text: str, table: str) -> str:
    """A document with the table between the two comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"There is no place for the table: put {BEGIN!r} and {END!r} into the document.")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> None:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "attention.csv")
    parser.add_argument("--document", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the two disagree")
    arguments = parser.parse_args(argv)
    rows = read(arguments.results)
    if not rows:
        sys.exit(f"There are no results in {arguments.results}: run benchmarks/attention.py first.")
    text = arguments.document.read_text(encoding="utf-8")
    written = with_table(text, speed_table(rows))
    if arguments.check:
        if written != text:
            sys.exit(f"{arguments.document.name} and the results disagree: run python benchmarks/tables.py.")
        return
    arguments.document.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
