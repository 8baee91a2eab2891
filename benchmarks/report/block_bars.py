"""What was asked of one attention block before the native kernels were written, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measurements.records import Row
from benchmarks.report.block_tables import attention_rows
from benchmarks.report.table_text import chosen, markdown, provenance

TABLES = ("random", "fixed_random", "factorized_random")
DENSE = ("dense", "dense+salience")
FACTORIZED = ("factorized_dense", "factorized_dense+salience")
FEW_LESS = 0.9
"""Of a bar: what is asked of ragged batches, and with the instruction set held down."""


@dataclass(frozen=True)
class Bars:
    """What was asked of some variants.

    Attributes:
        floor: whether inference is held to the measured floor of given weights, and not to stock through the same library.
        inference: at 128 and 512 tokens in batches of 8, and at 2048 in one of 2.
        bfloat16: inference at 128 and 512.
        training: a step at 128 and 512, with and without dropout, to stock.
    """

    variants: tuple[str, ...]
    floor: bool
    inference: tuple[float, float, float]
    bfloat16: tuple[float, float]
    training: float


BARS = (
    Bars(TABLES, True, (0.95, 0.92, 0.85), (0.9, 0.9), 1.25),
    Bars(("random+salience",), True, (0.9, 0.88, 0.75), (0.85, 0.85), 1.2),
    Bars(DENSE, False, (1.15, 1.05, 1.05), (1.2, 1.05), 1.05),
    Bars(FACTORIZED, False, (1.2, 1.25, 1.3), (1.1, 1.0), 1.1),
    Bars(("random+dot_product",), False, (0.95, 0.92, 0.92), (0.9, 0.9), 0.9),
)
LENGTHS = (("128", "8"), ("512", "8"), ("2048", "2"))
SETTINGS = {
    "": ({"padding": "none"}, 1.0),
    "ragged": ({"padding": "ragged"}, FEW_LESS),
    "held to AVX2": ({"padding": "none", "held_to": "AVX2"}, FEW_LESS),
}


def cells(bars: Bars) -> list[tuple[str, dict[str, str], str, float]]:
    """(title, conditions, the column that counts, what was asked) of each bar."""
    kind = "share_of_floor" if bars.floor else "same_library_speedup"
    made = []
    for (length, size), asked in zip(LENGTHS, bars.inference, strict=True):
        place = {"length": length, "batch_size": size}
        made.append((f"inference, {length}", {"mode": "inference", **place}, kind, asked))
    for (length, size), asked in zip(LENGTHS, bars.bfloat16, strict=False):
        place = {"length": length, "batch_size": size}
        made.append((f"bfloat16, {length}", {"mode": "inference", "dtype": "bfloat16", **place}, kind, asked))
    for dropout in ("0.0", "0.1"):
        for length, size in LENGTHS[:2]:
            title = f"training, {length}" + ("" if dropout == "0.0" else f", dropout {dropout}")
            place = {"mode": "train", "length": length, "batch_size": size, "dropout": dropout}
            made.append((title, place, "same_library_speedup", bars.training))
    return made


def bars() -> str:
    """A line a variant and setting: what was found / what was asked, bold where it is missed."""
    rows = [row for row in attention_rows() if row["share_of_floor"]]
    processors = list(dict.fromkeys(row["cpu"] for row in rows))
    lines, used, titles = [], [], []
    for processor in processors:
        own = [row for row in rows if row["cpu"] == processor]
        for setting, (conditions, share) in SETTINGS.items():
            for group in BARS:
                titles = [title for title, *_ in cells(group)]
                for variant in group.variants:
                    found = [
                        (chosen(own, **conditions, **place).get(variant), column, asked * share)
                        for _, place, column, asked in cells(group)
                    ]
                    line = [cell(row, column, asked) for row, column, asked in found]
                    used += [row for row, *_ in found if row]
                    if any(line):
                        name = ", ".join([f"`{variant}`", *([setting] if setting else [])])
                        lines.append([name, "floor" if group.floor else "stock", *line])
    return markdown(["attention", "inference to", *titles], lines) + "\n\n" + provenance(used)


def cell(row: Row | None, column: str, asked: float) -> str:
    """Found / asked."""
    if row is None or not row[column]:
        return ""
    said = f"{float(row[column]):.2f} / {asked:.2f}"
    return said if round(float(row[column]), 2) >= round(asked, 2) else f"**{said}**"
