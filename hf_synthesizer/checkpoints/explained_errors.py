"""Adds to errors of safetensors and of the Hub which file is damaged, and what the user can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from ..errors import CheckpointMismatchError


@contextmanager
def explain_load_errors(checkpoint: Any, **hub_arguments: Any) -> Iterator[None]:
    """Name the damaged file, or the checkpoint that does not fit, in the error.

    Raises:
        CheckpointMismatchError: in place of `SafetensorError`, and of one that does not name the checkpoint.
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointMismatchError(
            f"{_damaged_file(checkpoint, hub_arguments)} is truncated or damaged ({error}). Copy or download it again "
            f"(from_pretrained(..., force_download=True)), or save it again from the model."
        ) from error
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"The checkpoint {str(checkpoint)!r} does not fit: {error}") from error


@contextmanager
def explain_push_errors(model: nn.Module, repo_id: str) -> Iterator[None]:
    """Add to an error of the Hub's library that the model and its files are whole, and how to push again."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"Pushing this {type(model).__name__} to {repo_id!r} failed. The model in memory is as it was, and what "
            f"save_pretrained() wrote is whole. Push again once the cause is gone (offline: check the connection; 401 "
            f"or 403: log in with `hf auth login` and a token that may write): what has arrived is not sent twice."
        )
        raise


def _damaged_file(checkpoint: Any, hub_arguments: dict[str, Any]) -> str:
    folder = Path(str(checkpoint)) / (hub_arguments.get("subfolder") or "")
    if not folder.is_dir():
        with suppress(OSError):
            file = cached_file(checkpoint, SAFE_WEIGHTS_NAME, **{**hub_arguments, "local_files_only": True})
            return f"The file {file}"
        return f"A safetensors file of {checkpoint!r}"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return f"The file {path}"
    return f"A safetensors file in {folder}"
