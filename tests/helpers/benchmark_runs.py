"""A benchmark as its user runs it: `python -m benchmarks.…` in a process of its own, from the root of the repository."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import benchmarks

BENCHMARKS = Path(benchmarks.__file__).parent
ROOT = BENCHMARKS.parent


def run(module: str, *options: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `benchmarks.MODULE` with these options, on one thread and without a network; a variable that is None is taken away."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, options)],
        cwd=ROOT,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
    )


def lines(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
