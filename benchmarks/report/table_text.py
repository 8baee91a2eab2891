"""What the tables of the results have in common: choosing lines, and writing them as Markdown."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measurements.records import Row

Column = tuple[str, dict[str, Row]]
"""A title, and the measured lines by variant."""


def chosen(rows: list[Row], **conditions: str) -> dict[str, Row]:
    """What was measured under these conditions, by variant; on a processor that may do all it can, unless they say otherwise."""
    conditions = {"dtype": "float32", "dropout": "0.0", "status": "ok", **conditions}
    rows = [{"held_to": "", **row} for row in rows]
    conditions = {"held_to": "", **conditions}
    return {row["variant"]: row for row in rows if all(row[name] == value for name, value in conditions.items())}


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in (head, *lines) if line]
    return "\n".join([rows[0], "|---" + "|---:" * (len(head) - 1) + "|", *rows[1:]])


def by_variant(columns: list[Column], number: Callable[[Row], str]) -> str:
    """A line for each variant, a column for each set of conditions that was measured."""
    columns = [column for column in columns if column[1]]
    names = dict.fromkeys(name for _, found in columns for name in found)
    lines = [[name, *(number(found[name]) if name in found else "" for _, found in columns)] for name in names]
    used = [row for _, found in columns for row in found.values()]
    return markdown(["attention", *(title for title, _ in columns)], lines) + "\n\n" + provenance(used)


def provenance(rows: list[Row]) -> str:
    """On what, and when, the lines were measured: a line for each processor."""
    processors = dict.fromkeys(row["cpu"] for row in rows)
    return "\n\n".join(_provenance([row for row in rows if row["cpu"] == processor]) for processor in processors)


def _provenance(rows: list[Row]) -> str:
    def of(name: str) -> str:
        return ", ".join(sorted({row[name] for row in rows if row[name]})) or "not recorded"

    if all("instruction_set" in row and row["instruction_set"] for row in rows):
        return (
            f"{of('cpu')}, {of('instruction_set')}{' by request' * any(row.get('held_to') for row in rows)}, "
            f"{of('threads')} threads, torch {of('torch')}, transformers {of('transformers')}; commit {of('commit')}; "
            f"{of('date')}."
        )
    return (
        f"{of('cpu')}, {of('threads')} threads, torch {of('torch')}, transformers {of('transformers')}; commit "
        f"{of('commit')}; {of('date')}."
    )


def speedup(row: Row) -> str:
    return f"{float(row['speedup']):.2f}"
