"""Results as CSV: one line a measured thing, with the machine, the versions and the commit it was measured on."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KEY = ("benchmark", "model", "variant", "mode", "padding", "dtype", "dropout", "length", "batch_size", "threads")
"""What names a line, with the processor and what it was held down to. A line that is there is not measured again, unless it
is asked for."""
MACHINE = ("cpu", "held_to")
PROVENANCE = (
    *MACHINE,
    "instruction_set",
    "cores",
    "python",
    "torch",
    "transformers",
    "hf_synthesizer",
    "commit",
    "date",
)

Row = dict[str, str]


@cache
def provenance() -> Row:
    """The machine (its processor, not its name), the versions, the commit of the library and the day."""
    return {
        "cpu": processor(),
        "held_to": held_to(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "hf_synthesizer")},
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def processor() -> str:
    """Its name, family and model."""
    try:
        facts = dict(
            (part.strip() for part in line.split(":", 1))
            for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
            if ":" in line
        )
    except OSError:
        return platform.processor() or platform.machine()
    return (
        f"{facts.get('model name', platform.machine())} (family {facts.get('cpu family')}, model {facts.get('model')})"
    )


def held_to() -> str:
    """What the environment holds PyTorch's and oneDNN's instruction sets down to; nothing where they may use all there is."""
    return " ".join(
        sorted(
            {os.environ[name].upper() for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ}
        )
    )


def commit() -> str:
    """The commit of the code that runs, with `+` where the library has changes that are not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "hf_synthesizer")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def key(row: Row) -> tuple[str, ...]:
    """What names a line; a line that says nothing of a processor is this one's."""
    here = provenance() if "cpu" not in row else row
    return (*(row.get(name, "") for name in KEY), *(here.get(name, "") for name in MACHINE))


def read(path: Path) -> list[Row]:
    """All lines of a file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Results:
    """A CSV file that grows: lines are added as they are measured, and one with the same key is replaced."""

    def __init__(self, path: Path, fields: Iterable[str]):
        self.path = path
        self.fields = [*KEY, *fields, *PROVENANCE]
        self.rows = {key(row): row for row in read(path)}

    def has(self, row: Row) -> bool:
        """Whether it was measured. A line that was skipped is tried again."""
        known = self.rows.get(key(row))
        return known is not None and known.get("status") == "ok"

    def add(self, *rows: Row) -> None:
        """Add or replace lines, and write the file."""
        for row in rows:
            self.rows[key(row)] = {**row, **provenance()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.fields, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
        temporary.replace(self.path)


def quick_output(path: Path) -> Path:
    """Where a quick run writes: never into the results, whose lines it would replace; a file elsewhere was asked for."""
    if path.is_relative_to(RESULTS):
        path = ROOT / "outputs" / "quick" / path.relative_to(RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def threads() -> str:
    return str(torch.get_num_threads())
