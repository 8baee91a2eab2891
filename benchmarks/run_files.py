"""Runs of a benchmark, one JSON file each: which of them are missing, how one is written, and what stands in all of them."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from records import commit, processor


class HasAFile(Protocol):
    """A run with a name and a file."""

    @property
    def name(self) -> str: ...

    def path(self, folder: Path) -> Path: ...


AnyRun = TypeVar("AnyRun", bound=HasAFile)


def missing(runs: Sequence[AnyRun], folder: Path, *, every: bool) -> list[AnyRun]:
    """The runs without a file in the folder; it says how many are there, and of every run whether it is, if asked to."""
    found = [run for run in runs if not run.path(folder).exists()]
    if every:
        for run in runs:
            print(f"{'missing' if run in found else 'there':8} {run.name}")
    print(f"{len(runs) - len(found)} of {len(runs)} runs are there", flush=True)
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    """The file is there as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def measured_on() -> dict[str, Any]:
    """Machine, threads, versions, commit and day; to be asked for before the first run, for the commit is that of the code that runs."""
    return {
        "threads": torch.get_num_threads(),
        "machine": f"{processor()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "hf_synthesizer")},
        },
        "commit": commit(),
        "date": date.today().isoformat(),
    }
