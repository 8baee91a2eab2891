"""Runs of a benchmark, one JSON file each: which of them are missing, how one is written, and what stands in all of them."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.measurements.records import commit, processor


class Named(Protocol):
    """A run; what selects it are its fields."""

    @property
    def name(self) -> str: ...


AnyRun = TypeVar("AnyRun", bound=Named)
FIELDS = {"tasks": "task", "variants": "variant", "by": "by", "shares": "share", "seeds": "seed"}


def parser_of(
    text: str | None, example: str, tasks: Iterable[str], work_dir: str, kept: str
) -> argparse.ArgumentParser:
    """The command line that these benchmarks share; each adds its own.

    Args:
        text: what the benchmark is.
        example: the name of a run.
        tasks: there are.
        work_dir: the default of `--work_dir`.
        kept: what is kept there.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help=f"runs by name, such as {example}")
    parser.add_argument("--tasks", nargs="*", choices=tuple(tasks), help="these tasks alone")
    parser.add_argument("--threads", type=int, help="how many cores to use (default: all)")
    parser.add_argument("--work_dir", type=Path, default=Path(work_dir), help=f"where {kept} are kept")
    parser.add_argument("--list", action="store_true", help="only say which runs are there and which are missing")
    return parser


def wanted(run: Named, arguments: argparse.Namespace) -> bool:
    """Whether the command line selects a run: by its name, and by each field that values are named of."""
    if arguments.only and run.name not in arguments.only:
        return False
    chosen = {field: getattr(arguments, option, None) for option, field in FIELDS.items()}
    return all(not values or getattr(run, field) in values for field, values in chosen.items())


def missing(
    runs: Iterable[AnyRun], lacks: Callable[[AnyRun], Sequence[str]], arguments: argparse.Namespace
) -> list[AnyRun]:
    """The runs that the command line selects and that lack something; it says how many do not, and with `--list` what each lacks."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    selected = {run.name: (run, lacks(run)) for run in runs if wanted(run, arguments)}
    if arguments.list:
        for name, (_, parts) in selected.items():
            print(f"{', '.join(parts) or 'there':28} {name}")
    found = [run for run, parts in selected.values() if parts]
    print(f"{len(selected) - len(found)} of {len(selected)} runs are there", flush=True)
    return [] if arguments.list else found


def file_of(path: Path) -> list[str]:
    """What a run lacks that is all in one file."""
    return [] if path.exists() else ["missing"]


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
