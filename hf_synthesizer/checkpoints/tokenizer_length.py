"""The longest input of a patched model, for the tokenizer that lies beside it.

`truncation=True` cuts at the tokenizer's own maximum, which is the base model's; a synthesizer may be built for less.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..layers.patched import max_text_length
from .whole_files import write_whole

logger = logging.get_logger(__name__)

FILE = "tokenizer_config.json"


def shorten(tokenizer: Any, model: PreTrainedModel) -> None:
    """Let a tokenizer truncate at the model's longest input, in place, unless it does so earlier."""
    longest = max_text_length(model)
    if longest is not None and isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)


def shorten_saved(folder: Path, model: PreTrainedModel) -> None:
    """The same for a tokenizer that was saved into a folder, if one was. A file that cannot be read stays as it is."""
    path, longest = folder / FILE, max_text_length(model)
    if longest is None or not path.exists():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        short_enough = settings.get("model_max_length", longest + 1) <= longest
    except (ValueError, AttributeError, TypeError) as error:
        logger.warning("%s stays as it is: it cannot be read (%s).", path, error)
        return
    if not short_enough:
        settings["model_max_length"] = longest
        write_whole(path, json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def shorten_pushed(folder: Path, model: PreTrainedModel, repo_id: str, **hub_arguments: Any) -> None:
    """The same for a tokenizer that is in the repository already: a changed copy joins what is about to be pushed."""
    path = folder / FILE
    if path.exists():
        return
    try:
        pushed = Path(hf_hub_download(repo_id, FILE, **hub_arguments)).read_text(encoding="utf-8")
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return
    path.write_text(pushed, encoding="utf-8")
    shorten_saved(folder, model)
    if path.read_text(encoding="utf-8") == pushed:
        path.unlink()
