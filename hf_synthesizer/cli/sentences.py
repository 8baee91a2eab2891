"""What makes a SentenceTransformer of a model: `modules.json`, and the folders of pooling and other modules that it names."""

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
    """Where a SentenceTransformer's files are, and which these are beside its model's own: files, and folders of modules. None
    for a model that is no SentenceTransformer.

    Raises:
        CommandError: for a `modules.json` that cannot be read, or names what is not in its folder.
    """
    from transformers.utils import cached_file

    found = cached_file(
        source,
        MODULES,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    try:
        paths = [PurePosixPath(module["path"]) for module in json.loads(Path(found).read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{MODULES} of {source} cannot be read ({type(error).__name__}: {error}).") from error
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise CommandError(f"{MODULES} of {source} names a folder outside of the model's own.")
    folders = [str(path) for path in paths if path.parts]
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [MODULES, *SETTINGS, *(f"{name}/*" for name in folders)]
        folder = Path(snapshot_download(source, allow_patterns=patterns))
    return folder, [name for name in (MODULES, *SETTINGS, *folders) if (folder / name).exists()]


def keep_sentence_files(source: str, output: Path, longest: int | None) -> bool:
    """Copy a SentenceTransformer's files beside a converted model, with its longest text; whether it is one."""
    found = sentence_files(source)
    if found is None:
        return False
    folder, names = found
    for name in names:
        if folder.resolve() == output.resolve():
            break
        if (folder / name).is_dir():
            shutil.copytree(folder / name, output / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(folder / name, output / name)
    settings = output / SETTINGS[1]
    if longest is not None and settings.exists():
        from ..checkpoints.whole_files import write_whole

        held: Any = json.loads(settings.read_text(encoding="utf-8"))
        if isinstance(held, dict) and isinstance(held.get("max_seq_length"), int) and held["max_seq_length"] > longest:
            write_whole(settings, json.dumps({**held, "max_seq_length": longest}, indent=2) + "\n")
    return True


def load_sentences(model: str) -> Any:
    """The SentenceTransformer in a folder or on the Hub; None for another model, and, with a word, without its package."""
    if sentence_files(model) is None:
        return None
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        typer.echo(
            f"{model} is a SentenceTransformer, but sentence-transformers is not installed: its last hidden states are "
            f"measured, and not its embeddings.",
            err=True,
        )
        return None
    return SentenceTransformer(model, device="cpu")
