"""Shortens the maximum of the tokenizer beside a patched model to the longest text that the model reads.

`truncation=True` cuts at the tokenizer's own maximum. That is the base model's, and a synthesizer may be built for less.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..layers.finding.attention_layers import find_attention_layers
from ..layers.lengths import max_text_length
from .whole_files import write_whole

logger = logging.get_logger(__name__)

FILE = "tokenizer_config.json"


def shorten(tokenizer: Any, model: PreTrainedModel) -> None:
    """Let a tokenizer truncate at the longest text of a model, in place, unless it truncates earlier."""
    max_length = max_text_length(find_attention_layers(model).layers)
    if max_length is not None and isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)


def shorten_saved(folder: Path, max_length: int | None) -> None:
    """Let the tokenizer in a folder, if there is one, truncate at `max_length`. A file that cannot be read stays as it is."""
    path = folder / FILE
    if max_length is None or not path.exists():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        short_enough = settings.get("model_max_length", max_length + 1) <= max_length
    except (ValueError, AttributeError, TypeError) as error:
        logger.warning("%s stays as it is: it cannot be read (%s).", path, error)
        return
    if not short_enough:
        settings["model_max_length"] = max_length
        write_whole(path, json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def shorten_pushed(folder: Path, max_length: int | None, repo_id: str, **hub_arguments: Any) -> None:
    """The same for a tokenizer that is in the repository already: a changed copy is added to the folder that will be pushed."""
    path = folder / FILE
    if path.exists():
        return
    try:
        pushed = Path(hf_hub_download(repo_id, FILE, **hub_arguments)).read_text(encoding="utf-8")
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return
    path.write_text(pushed, encoding="utf-8")
    shorten_saved(folder, max_length)
    if path.read_text(encoding="utf-8") == pushed:
        path.unlink()
