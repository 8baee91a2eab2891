"""What goes where: a report to stdout, everything else to stderr, and of a user's mistake one message and no traceback."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..errors import SynthesizerError

EXTRAS = {
    "datasets": "examples",
    "evaluate": "examples",
    "matplotlib": "plots",
    "scipy": "examples",
    "sklearn": "examples",
}
"""Which optional dependencies of `setup.cfg` bring a package."""

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


class CommandError(SynthesizerError, ValueError):
    """What a command was given cannot be; the message is for the user."""


@contextmanager
def working() -> Iterator[None]:
    """While a command works, stdout stays free for its report: what libraries print goes to stderr. Interrupted it leaves with 130."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def report(data: Any, text: str, as_json: bool) -> None:
    """Print a report, for a program or for a person."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str) if as_json else text)


def require_folder(folder: Path) -> None:
    """Whether a folder can be written: better known before the work than after it. Nothing is left there.

    Raises:
        CommandError: where it can not.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror or error}.") from error
    finally:
        for path in missing:
            if path.exists():
                path.rmdir()


def require_file(file: Path, *endings: str) -> None:
    """Whether a file can be written, and ends as what it is to be.

    Raises:
        CommandError: where it can not, or does not.
    """
    if file.suffix.lower() not in endings:
        raise CommandError(f"{file} has to end in {' or '.join(endings)}.")
    if not file.parent.is_dir():
        raise CommandError(f"{file} cannot be written: there is no folder {file.parent}.")
    require_folder(file.parent)


def watched() -> bool:
    """Whether somebody sees progress bars."""
    return sys.stderr.isatty()


def hide_progress_bars() -> None:
    """For every library that draws them, before it is imported."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"


def fail(error: BaseException) -> NoReturn:
    """Say what is wrong, and leave with 1.

    Raises:
        BaseException: the error itself, where it is a mistake of ours and not the user's.
    """
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise error
        message = (
            f"This command needs {error.name}, which is not installed: install hf_synthesizer with the extra '{extra}', "
            f"or {error.name} alone."
        )
    else:
        message = str(error).strip() or type(error).__name__
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(1) from None
