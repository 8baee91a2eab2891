"""Writes the model card (README.md) of a patched model, or updates our part of a card that a user wrote."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel
from transformers.utils import logging

from ..layers.finding.attention_layers import AttentionLayers, find_attention_layers
from .model_card_contents import BEGIN, END, card_contents
from .whole_files import write_whole

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)

FILE = "README.md"
EMPTY = "---\n{}\n---\n"


def write_model_card(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    repo_id: str | None = None,
    trainer: Trainer | None = None,
    attention_layers: AttentionLayers | None = None,
) -> None:
    """Write `README.md` into a folder, or bring the one that is there up to date.

    The text and the metadata of a card that somebody wrote stay as they are. Our part is added at its end, or renewed in its
    place. Missing metadata are added.

    Args:
        model: a patched model.
        folder: where `README.md` lies, or will.
        repo_id: the model's name on the Hub, for the line of code that loads it; the folder's name if None.
        trainer: the Trainer that trained it, if the card should report its results.
        attention_layers: of the model, if the caller has found them.
    """
    path = Path(folder) / FILE
    existing = path.read_text(encoding="utf-8") if path.exists() else None
    repo_id = repo_id or path.parent.resolve().name
    try:
        card = model_card(model, existing, repo_id=repo_id, trainer=trainer, attention_layers=attention_layers)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if existing is None:
            raise
        logger.warning("%s stays as it is: its metadata cannot be read (%s).", path, error)
        return
    write_whole(path, card)


def model_card(
    model: PreTrainedModel,
    existing: str | None = None,
    *,
    repo_id: str,
    trainer: Trainer | None = None,
    attention_layers: AttentionLayers | None = None,
) -> str:
    """The text of the card with its metadata, merged into the card `existing`."""
    metadata, section = card_contents(model, attention_layers or find_attention_layers(model), repo_id, trainer)
    card = ModelCard(existing or EMPTY)
    data = merge_metadata(card.data.to_dict(), metadata)
    if not own_words(card.text):
        text = f"# {repo_id.rpartition('/')[2]}\n\n{section}"
    elif BEGIN in card.text and END in card.text:
        before, _, rest = card.text.partition(BEGIN)
        text = before + section + rest.partition(END)[2]
    else:
        text = f"{card.text.rstrip()}\n\n{section}"
    return f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n"


def merge_metadata(data: dict[str, Any], further: dict[str, Any]) -> ModelCardData:
    """The metadata of a card, with the `further` keys that it lacks, and with all tags of both."""
    tags = dict.fromkeys([*(data.get("tags") or []), *(further.get("tags") or [])])
    return ModelCardData(**{**further, **data, "tags": list(tags)})


def own_words(text: str) -> str:
    """The text of a card without our part, the title above it, and the empty form of Transformers."""
    before, _, rest = text.partition(BEGIN)
    words = re.sub(r"\A# .*\n*\Z", "", before.strip()) + rest.partition(END)[2].strip()
    return "" if words == _empty_form() else words


@cache
def _empty_form() -> str:
    """The empty form that Transformers pushes if there is no card."""
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    return ModelCard.from_template(ModelCardData(), model_description=description).text.strip()
