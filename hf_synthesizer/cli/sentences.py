"""The files of a SentenceTransformer beside its model: `modules.json`, and the folders of the modules that it names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from .console import CommandError

MODULES = "modules.json"
SETTINGS = ("config_sentence_transformers.json", "sentence_bert_config.json")


def sentence_files(source: str) -> tuple[Path, list[str]] | None:
    """The folder of a SentenceTransformer, and its files and folders beside those of the model. None for other models.

    Raises:
        CommandError: for a `modules.json` that cannot be read, or that names folders outside its own.
    """
    from transformers.utils import cached_file

    modules_file = cached_file(
        source,
        MODULES,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if modules_file is None:
        return None
    try:
        modules = json.loads(Path(modules_file).read_text(encoding="utf-8"))
        paths = [PurePosixPath(module["path"]) for module in modules]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{MODULES} of {source} cannot be read ({type(error).__name__}: {error}).") from error
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise CommandError(f"{MODULES} of {source} names a folder outside the model's folder.")
    folders = [str(path) for path in paths if path.parts]
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [MODULES, *SETTINGS, *(f"{name}/*" for name in folders)]
        folder = Path(snapshot_download(source, allow_patterns=patterns))
    return folder, [name for name in (MODULES, *SETTINGS, *folders) if (folder / name).exists()]


def copy_sentence_files(source: str, output: Path, longest: int | None) -> None:
    """Copy the files of a SentenceTransformer to a converted model, and lower its maximum length to `longest`."""
    files = sentence_files(source)
    if files is None:
        return
    folder, names = files
    for name in names if folder.resolve() != output.resolve() else ():
        if (folder / name).is_dir():
            shutil.copytree(folder / name, output / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(folder / name, output / name)
    settings = output / SETTINGS[1]
    if longest is not None and settings.exists():
        from ..checkpoints.whole_files import write_whole

        values: Any = json.loads(settings.read_text(encoding="utf-8"))
        length = values.get("max_seq_length") if isinstance(values, dict) else None
        if isinstance(length, int) and length > longest:
            write_whole(settings, json.dumps({**values, "max_seq_length": longest}, indent=2) + "\n")


def load_sentences(model: str) -> Any:
    """Load a SentenceTransformer. None for other models, and, with a message, without the package."""
    if sentence_files(model) is None:
        return None
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        typer.echo(
            f"{model} is a SentenceTransformer, but sentence-transformers is not installed: its last hidden states "
            f"take the place of its embeddings.",
            err=True,
        )
        return None
    return SentenceTransformer(model, device="cpu")
