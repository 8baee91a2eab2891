"""The tables of `benchmarks/block/long_sequences.py`: long sequences, and what was asked of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.block.blocks import WIDTH_ONE
from benchmarks.measurements.records import RESULTS, Row, read
from benchmarks.report.table_text import markdown, provenance

FILE = RESULTS / "long_sequences.csv"
NOT_YET = "Not measured yet: `python -m benchmarks.block.long_sequences`."
GROWING = ("relative", "relative+salience", "relative (window 128)", "dot_product (window 128)")
"""The variants whose cost is to grow with the length."""
SHORT, LONG = 2048, 32768
"""The lengths between which growth is measured."""


class Found:
    """The lines of one processor, by variant, mode, data type and length."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = {
            (row["variant"], row["mode"], row["dtype"], int(row["length"])): row
            for row in rows
            if row["status"] == "ok"
        }
        self.lengths = sorted({length for *_, length in self.rows})
        self.variants = list(dict.fromkeys(variant for variant, *_ in self.rows))

    def number(self, column: str, variant: str, mode: str, dtype: str, length: int) -> float | None:
        """A number of a line; None if it was not measured."""
        text = self.rows.get((variant, mode, dtype, length), {}).get(column)
        return float(text) if text else None

    def to_stock(self, variant: str, mode: str, dtype: str, length: int) -> float | None:
        """How many times as fast as stock."""
        return self.number("same_library_speedup", variant, mode, dtype, length)

    def exponent(self, variant: str, dtype: str) -> float | None:
        """The exponent of L in the time of inference from SHORT to LONG."""
        times = [self.number("median_ms", variant, "inference", dtype, length) for length in (SHORT, LONG)]
        if times[0] is None or times[1] is None:
            return None
        return math.log(times[1] / times[0]) / math.log(LONG / SHORT)

    def memory(self, variant: str, dtype: str) -> float | None:
        """The peak memory at LONG relative to that of weights of width one."""
        peaks = [self.number("peak_mb", name, "inference", dtype, LONG) for name in (variant, WIDTH_ONE)]
        return peaks[0] / peaks[1] if peaks[0] is not None and peaks[1] else None

    def to_table(self, length: int) -> float | None:
        """How many times as fast as `random` `relative` is in inference."""
        times = [self.number("median_ms", name, "inference", "float32", length) for name in ("random", "relative")]
        return None if times[0] is None or times[1] is None else times[0] / times[1]


@dataclass(frozen=True)
class Bar:
    """One thing that was asked: at least a number, or at most."""

    title: str
    asked: float
    number: Callable[[Found], float | None]
    most: bool = False

    def line(self, found: Found) -> list[str]:
        """Title, asked, found, and whether it is met."""
        number = self.number(found)
        asked = f"{'at most' if self.most else 'at least'} {self.asked:g}"
        if number is None:
            return [self.title, asked, "not measured", ""]
        number = round(number, 2)
        return [
            self.title,
            asked,
            f"{number:g}",
            "met" if (number <= self.asked if self.most else number >= self.asked) else "**missed**",
        ]


def _to_stock(variant: str, mode: str, length: int, asked: float) -> Bar:
    title = f"`{variant}`, {'training' if mode == 'train' else mode}, {length:,} tokens, times as fast as stock"
    return Bar(title, asked, lambda found: found.to_stock(variant, mode, "float32", length))


def _growth(variant: str) -> Bar:
    title = f"`{variant}`, exponent of the growth from {SHORT:,} to {LONG:,} tokens"
    return Bar(title, 1.1, lambda found: found.exponent(variant, "float32"), most=True)


def _memory(variant: str) -> Bar:
    title = f"`{variant}`, peak memory at {LONG:,} tokens, to weights of width one"
    return Bar(title, 1.2, lambda found: found.memory(variant, "float32"), most=True)


BARS = (
    *(_to_stock("relative", "inference", length, asked) for length, asked in ((2048, 4), (8192, 14), (32768, 40))),
    *(_to_stock("relative", "train", length, asked) for length, asked in ((2048, 2.5), (8192, 8))),
    _to_stock("dot_product (window 128)", "inference", 8192, 6),
    *map(_growth, GROWING),
    *map(_memory, GROWING),
    Bar("`relative`, inference, 512 tokens, times as fast as `random`", 1, lambda found: found.to_table(512)),
)


def rows_of_first_machine() -> list[Row]:
    """The lines of the processor, instruction set and number of threads that come first in the file."""
    rows = read(FILE)
    machine = ("cpu", "held_to", "threads")
    return [row for row in rows if all(row[name] == rows[0][name] for name in machine)]


def long_sequences() -> str:
    """Times as fast as stock through the same library, growth and memory."""
    rows = rows_of_first_machine()
    if not rows:
        return NOT_YET
    found = Found(rows)
    cells = [
        (mode, dtype, length)
        for dtype in ("float32", "bfloat16")
        for mode in ("inference", "train")
        for length in found.lengths
        if any(found.to_stock(variant, mode, dtype, length) for variant in found.variants)
    ]

    def text(number: float | None) -> str:
        return "" if number is None else f"{number:.2f}"

    lines = [
        [
            variant,
            *(text(found.to_stock(variant, *cell)) for cell in cells),
            text(found.exponent(variant, "float32")),
            text(found.memory(variant, "float32")),
        ]
        for variant in found.variants
    ]
    titles = [f"{'training' if mode == 'train' else mode}, {dtype}, {length:,}" for mode, dtype, length in cells]
    head = ["attention", *titles, f"exponent, {SHORT:,} to {LONG:,}", f"memory at {LONG:,}, to width one"]
    return markdown(head, lines) + "\n\n" + provenance(rows)


def long_bars() -> str:
    """What was asked, what was found, and whether it is met."""
    rows = rows_of_first_machine()
    if not rows:
        return NOT_YET
    found = Found(rows)
    return (
        markdown(["what was asked", "asked", "found", ""], [bar.line(found) for bar in BARS])
        + "\n\n"
        + provenance(rows)
    )
