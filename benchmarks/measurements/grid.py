"""What the benchmarks share: the grid of cells, its command line, and the walk over it that skips what is there."""

from __future__ import annotations

import argparse
import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from tqdm import tqdm

from benchmarks.measurements import devices
from benchmarks.measurements.bystanders import Bystanders
from benchmarks.measurements.devices import available_memory
from benchmarks.measurements.records import RESULTS, Results, Row, quick_output, threads
from hf_synthesizer import SynthesizerError
from hf_synthesizer.measuring.timing import Spread


class NotServed(Exception):
    """A block cannot be measured under these conditions; the message is the reason that the results give."""


Found = TypeVar("Found")
Measured = tuple[str, Spread | str, Spread] | tuple[str, Spread | str, Spread, Row]
"""A variant, its times or the reason why there are none, and the times of stock SDPA in the same run; perhaps more columns."""

MODES, PADDINGS, DTYPES = ("inference", "train"), ("none", "ragged"), ("float32", "bfloat16")
TIMING_FIELDS = (
    "status",
    "reason",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "rounds",
    "stock_sdpa_ms",
    "speedup",
    "others",
    "device",
)
"""`stock_sdpa_ms` is stock's median in the same interleaved run, and `speedup` how often the line's fits into it; `others`, how
many cores other processes kept busy meanwhile."""
FAILURES = (NotServed, SynthesizerError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Cell:
    """One set of conditions, under which all variants are measured."""

    mode: str
    padding: str
    dtype: str
    dropout: float
    length: int
    batch_size: int
    device: str = "cpu"

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        devices.wait(self.device)

    @property
    def train(self) -> bool:
        return self.mode == "train"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def row(self, benchmark: str, model: str, variant: str) -> Row:
        """The key of a line."""
        return {
            "benchmark": benchmark,
            "model": model,
            "variant": variant,
            "threads": threads(),
            **{name: str(getattr(self, name)) for name in self.__dataclass_fields__},
            "device": devices.name(self.device),
        }


def words(text: str) -> list[str]:
    """What stands between commas; the one in the name `stock sdpa, same library` is none."""
    return [word.strip() for word in re.split(r",(?! same library)", text) if word.strip()]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def choices(*allowed: str) -> Callable[[str], list[str]]:
    """A type for argparse: names separated by commas."""

    def parse(text: str) -> list[str]:
        for word in words(text):
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of: {', '.join(allowed)}")
        return words(text)

    return parse


def parser(description: str | None, output: str, variants: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options that all benchmarks know."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--variants", type=words, default=list(variants), help="names separated by commas")
    made.add_argument("--lengths", type=numbers, default=[128, 512, 1024, 2048, 4096])
    made.add_argument("--batch_sizes", type=numbers, default=[1, 8])
    made.add_argument("--modes", type=choices(*MODES), default=list(MODES))
    made.add_argument("--padding", type=choices(*PADDINGS), default=list(PADDINGS))
    made.add_argument("--dtypes", type=choices(*DTYPES), default=list(DTYPES))
    made.add_argument("--dropout", type=float, default=0.0, help="of attention weights, in training")
    made.add_argument("--repeats", type=int, default=15, help="rounds of the interleaved run, at most")
    made.add_argument(
        "--seconds", type=float, default=60.0, help="for a cell: fewer rounds, down to three, to keep it"
    )
    made.add_argument(
        "--max_others", type=float, help="measure a cell again while others keep more cores than this busy"
    )
    made.add_argument("--retries", type=int, default=5, help="how often, at most")
    made.add_argument("--threads", type=int, help="how many cores to use (default: torch's choice)")
    made.add_argument("--output", type=Path, default=RESULTS / output, help="the CSV file that grows")
    made.set_defaults(device="cpu")
    made.add_argument("--force", action="store_true", help="measure again what is in the file")
    made.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    return made


def make_quick(arguments: argparse.Namespace, variants: list[str], length: int = 32) -> None:
    """Cut the grid down to one cell a mode."""
    arguments.variants, arguments.output = variants, quick_output(arguments.output)
    arguments.lengths, arguments.batch_sizes = [length], [1]
    arguments.padding, arguments.dtypes, arguments.repeats = ["ragged"], ["float32"], 3


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All combinations, the short ones first."""
    for length, batch_size, dtype, padding, mode in itertools.product(
        arguments.lengths, arguments.batch_sizes, arguments.dtypes, arguments.padding, arguments.modes
    ):
        dropout = arguments.dropout if mode == "train" else 0.0
        yield Cell(mode, padding, dtype, dropout, length, batch_size, arguments.device)


def with_device(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The option of those benchmarks that run on any device."""
    made.add_argument(
        "--device",
        choices=devices.DEVICES,
        default="cpu",
        help="where to measure; the results of a device go to a file of its own, such as attention-cuda.csv",
    )
    return made


def results(arguments: argparse.Namespace, fields: Iterable[str]) -> Results:
    """The file for the device that is asked for; leaves with a message where there is no such device."""
    devices.require(arguments.device)
    path = arguments.output
    if arguments.device != "cpu":
        path = path.with_stem(f"{path.stem}-{arguments.device}")
    return Results(path, fields)


def require_memory(needed: int, device: str = "cpu") -> None:
    """Raise `NotServed` when there is not as much to be had."""
    free = available_memory(device)
    if needed > free:
        raise NotServed(f"would need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def walk(
    benchmark: str,
    models: tuple[str, ...],
    arguments: argparse.Namespace,
    measure: Callable[[str, Cell, list[str]], Sequence[Measured]],
    fields: tuple[str, ...] = (),
) -> None:
    """Measure every cell of the grid that the file lacks.

    `measure(model, cell, variants)` gives what was measured of each variant; `fields` are the columns that it adds.
    """
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    found_before = results(arguments, (*TIMING_FIELDS, *fields))
    grid = list(itertools.product(models, cells(arguments)))
    bar = tqdm(grid, unit="cell", desc=benchmark)
    for model, cell in bar:
        missing = [
            name
            for name in arguments.variants
            if arguments.force or not found_before.has(cell.row(benchmark, model, name))
        ]
        if not missing:
            continue
        bar.set_postfix_str(f"{model} {cell.mode} {cell.padding} {cell.dtype} {cell.length}x{cell.batch_size}")
        found, others = undisturbed(partial(measure, model, cell, missing), arguments)
        found_before.add(
            *(
                {
                    **cell.row(benchmark, model, name),
                    **outcome(spread, stock),
                    **_more(more),
                    "others": f"{others:.2f}",
                }
                for name, spread, stock, *more in found
            )
        )
        gc.collect()


def _more(rows: Iterable[Row]) -> Row:
    return {name: text for row in rows for name, text in row.items()}


def undisturbed(measure: Callable[[], Found], arguments: argparse.Namespace) -> tuple[Found, float]:
    """What was measured, and how many cores others kept busy meanwhile: the least disturbed of several tries.

    Without `--max_others` there is one try.
    """
    best: tuple[Found, float] | None = None
    for _ in range(1 if arguments.max_others is None else 1 + arguments.retries):
        bystanders = Bystanders()
        found = measure()
        others = bystanders.cores()
        if best is None or others < best[1]:
            best = found, others
        if arguments.max_others is None or best[1] <= arguments.max_others:
            break
        gc.collect()
    return cast("tuple[Found, float]", best)


def outcome(found: Spread | str, stock: Spread) -> Row:
    """The columns of what came out."""
    if isinstance(found, str):
        return {"status": "skipped", "reason": found}
    speedup = stock.median / found.median
    return {"status": "ok", **found.row(), "stock_sdpa_ms": f"{stock.median:.3f}", "speedup": f"{speedup:.3f}"}


def reason(error: Exception) -> str:
    """An error as one line of a table."""
    prefix = "" if isinstance(error, NotServed) else f"{type(error).__name__}: "
    return (prefix + " ".join(str(error).split()))[:160]
