"""Output of commands: reports go to stdout, everything else goes to stderr. A user's mistake gives one message, no traceback."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import typer

from ..errors import SynthesizerError

EXTRAS = {
    "datasets": "examples",
    "evaluate": "examples",
    "matplotlib": "plots",
    "scipy": "examples",
    "sklearn": "examples",
}
"""The optional dependency group in `setup.cfg` that contains a package."""


class CommandError(SynthesizerError, ValueError):
    """The arguments of a command cannot be served. The message is for the user."""


@contextmanager
def redirect_output() -> Iterator[None]:
    """Inside the context, libraries print to stderr, so stdout has the report alone. An interrupt exits with 130."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def show(data: Any, text: str, as_json: bool) -> None:
    """Print a report, as JSON or as text."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str) if as_json else text)


def require_folder(folder: Path) -> None:
    """Check before the work that a folder can be written; `CommandError` if not. The check leaves no files."""
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
    """Check that a file can be written and has one of these endings; `CommandError` if not."""
    if file.suffix.lower() not in endings:
        raise CommandError(f"{file} must end in {' or '.join(endings)}.")
    if not file.parent.is_dir():
        raise CommandError(f"{file} cannot be written: there is no folder {file.parent}.")
    require_folder(file.parent)


def shows_progress() -> bool:
    """Whether stderr is a terminal, so that progress bars make sense."""
    return sys.stderr.isatty()


def hide_progress_bars() -> None:
    """Switch off the progress bars of other libraries. Call it before they are imported."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"


def fail(error: BaseException) -> NoReturn:
    """Print the message of an error, and exit with 1.

    Raises:
        BaseException: the error itself, if it is a bug and no mistake of the user.
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
