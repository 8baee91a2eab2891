"""The tables of `benchmarks/block/attention.py`: one attention block, on each processor that was measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.measurements.records import RESULTS, Row, read
from benchmarks.report.table_text import Column, by_variant, chosen, markdown, provenance

CELLS = (("128", "8"), ("512", "8"), ("2048", "2"))
BESIDE = ("stock", "floor", "fnet", "nystromformer", "linformer")
"""How the names begin of what is no form of ours."""


def attention_rows() -> list[Row]:
    """The lines of one attention block that are compared with stock through the same library."""
    return [row for row in read(RESULTS / "attention.csv") if row.get("same_library_speedup")]


def blocks_of_processors(rows: list[Row], columns: Callable[[list[Row]], list[Column]]) -> list[Column]:
    """The columns of each processor beside those of the others, under its maker's name where there are several."""
    processors = list(dict.fromkeys(row["cpu"] for row in rows))
    made: list[Column] = []
    for processor in processors:
        own = columns([row for row in rows if row["cpu"] == processor])
        name = processor.split()[0].removesuffix("(R)")
        made += own if len(processors) == 1 else [(f"{name}: {title}", found) for title, found in own]
    return made


def headline(row: Row) -> str:
    """Times as fast as stock with its projections through the same library."""
    return f"{float(row['same_library_speedup']):.2f}"


def cells_of(rows: list[Row], title: str, **conditions: str) -> list[Column]:
    return [
        (f"{title}{length}", chosen(rows, length=length, batch_size=batch_size, **conditions))
        for length, batch_size in CELLS
    ]


def speed() -> str:
    """One attention block, relative to stock SDPA through the same library."""

    def columns(rows: list[Row]) -> list[Column]:
        made = cells_of(rows, "inference, ", mode="inference", padding="none")
        made += cells_of(rows, "ragged, ", mode="inference", padding="ragged")
        return made + cells_of(rows, "training, ", mode="train", padding="none")

    return by_variant(blocks_of_processors(attention_rows(), columns), headline)


def variants() -> str:
    """What a user chooses by: each variant at 512 tokens in batches of 8, on the processor with the native kernels."""
    rows = [row for row in attention_rows() if not row["variant"].startswith(BESIDE) and "(" not in row["variant"]]
    cells = (
        ("inference", {"mode": "inference", "padding": "none"}),
        ("inference, ragged", {"mode": "inference", "padding": "ragged"}),
        ("inference, bfloat16", {"mode": "inference", "padding": "none", "dtype": "bfloat16"}),
        ("training", {"mode": "train", "padding": "none"}),
        ("training, dropout 0.1", {"mode": "train", "padding": "none", "dropout": "0.1"}),
        ("training, bfloat16", {"mode": "train", "padding": "none", "dtype": "bfloat16"}),
    )
    first = [row for row in rows if row["cpu"] == rows[0]["cpu"]]
    columns = [(title, chosen(first, length="512", batch_size="8", **conditions)) for title, conditions in cells]
    return by_variant(columns, headline)


def account() -> str:
    """What each form costs beside its own floor and that of given weights, unpadded inference."""

    def columns(rows: list[Row]) -> list[Column]:
        made = cells_of(rows, "", mode="inference", padding="none")
        return made + cells_of(rows, "bfloat16, ", mode="inference", padding="none", dtype="bfloat16")

    def shares(row: Row) -> str:
        return (
            f"{float(row['share_of_own_floor']):.2f} / {float(row['share_of_floor']):.2f}"
            if row["share_of_own_floor"]
            else ""
        )

    rows = [row for row in attention_rows() if row["own_floor_ms"]]
    peaks = dict.fromkeys((row["cpu"], row["dtype"]) for row in rows)
    said = []
    for processor, dtype in peaks:
        found = [
            int(row["peak_gflops"])
            for row in rows
            if (row["cpu"], row["dtype"], row["held_to"]) == (processor, dtype, "")
        ]
        if found:
            said.append(f"{dtype}: {min(found)} to {max(found)} GFLOP/s")
    return (
        by_variant(blocks_of_processors(rows, columns), shares) + f"\n\nPeaks found in these runs: {'; '.join(said)}."
    )


def held_down() -> str:
    """The same with the instruction set held down to AVX2, a stand-in for older machines."""

    def columns(rows: list[Row]) -> list[Column]:
        made = []
        for title, mode, dtype in (
            ("inference", "inference", "float32"),
            ("training", "train", "float32"),
            ("bfloat16", "inference", "bfloat16"),
        ):
            made += cells_of(rows, f"{title}, ", mode=mode, padding="none", dtype=dtype, held_to="AVX2")
        return made

    return by_variant(blocks_of_processors([row for row in attention_rows() if row["held_to"]], columns), headline)


def slowest() -> str:
    """The least of all ratios of each form, over all lengths and batch sizes."""
    kinds = [(mode, dtype) for mode in ("inference", "train") for dtype in ("float32", "bfloat16")]
    rows = [row for row in attention_rows() if row["median_ms"] and row["dropout"] == "0.0" and not row["held_to"]]
    ours = [name for name in dict.fromkeys(row["variant"] for row in rows) if not name.startswith(BESIDE)]
    lines = []
    for name in ours:
        line = [name]
        for mode, dtype in kinds:
            own = [row for row in rows if (row["variant"], row["mode"], row["dtype"]) == (name, mode, dtype)]
            least = min(own, key=lambda row: float(row["same_library_speedup"]), default=None)
            line.append(
                f"{headline(least)} ({least['length']}×{least['batch_size']}; {len(own)} cells)" if least else ""
            )
        lines.append(line)
    head = ["attention", *(f"{'training' if mode == 'train' else mode}, {dtype}" for mode, dtype in kinds)]
    return markdown(head, lines) + "\n\n" + provenance([row for row in rows if row["variant"] in ours])


def milliseconds() -> str:
    """The same in absolute time, unpadded inference."""
    rows = [row for row in attention_rows() if row["median_ms"]]
    return by_variant(
        blocks_of_processors(rows, lambda own: cells_of(own, "", mode="inference", padding="none")),
        lambda row: f"{float(row['median_ms']):.1f} ({float(row['p20_ms']):.1f}–{float(row['p80_ms']):.1f})",
    )


def lengths() -> str:
    """Other lengths and batch sizes, and ragged training."""
    rows = attention_rows()
    wanted = [
        ("inference", "none", "128", "1"),
        ("inference", "none", "512", "1"),
        ("inference", "none", "2048", "1"),
        ("inference", "none", "4096", "1"),
        ("inference", "none", "1024", "8"),
        ("train", "none", "1024", "8"),
        ("train", "none", "4096", "1"),
        ("train", "ragged", "128", "8"),
        ("train", "ragged", "512", "8"),
    ]
    columns = [
        (
            f"{'training' if mode == 'train' else mode}{', ragged' if padding == 'ragged' else ''}, {length}×{batch_size}",
            chosen(rows, mode=mode, padding=padding, length=length, batch_size=batch_size),
        )
        for mode, padding, length, batch_size in wanted
    ]
    return by_variant(columns, headline)


def dropout() -> str:
    """Training with dropout of attention weights."""

    def columns(rows: list[Row]) -> list[Column]:
        return cells_of(rows, "training, ", mode="train", padding="none", dropout="0.1")

    return by_variant(blocks_of_processors(attention_rows(), columns), headline)


def bfloat16() -> str:
    """Speed in bfloat16."""

    def columns(rows: list[Row]) -> list[Column]:
        made = cells_of(rows, "inference, ", mode="inference", padding="none", dtype="bfloat16")
        return made + cells_of(rows, "training, ", mode="train", padding="none", dtype="bfloat16")

    return by_variant(blocks_of_processors(attention_rows(), columns), headline)


def before_after() -> str:
    """A change against the commit before it, and that commit against itself."""
    rows = read(RESULTS / "before_after.csv")
    lines = []
    for title, column in (("the new commit", "speedup"), ("the old commit again", "same_again")):
        values = sorted(float(row[column]) for row in rows)
        low = sum(value < 0.97 for value in values)
        lines.append(
            [
                title,
                str(len(values)),
                *(f"{number:.2f}" for number in (median(values), values[0], values[-1])),
                str(low),
            ]
        )
    head = ["old commit against", "cells", "median", "least", "most", "cells below 0.97"]
    old = ", ".join(sorted({row["before_commit"] for row in rows}))
    return markdown(head, lines) + f"\n\nThe old commit is {old}. {provenance(rows)}"
