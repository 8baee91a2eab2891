"""Our model card in the place of Trainer's own."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from ..errors import NotPatchedError
from ..layers.patched import is_patched
from .model_card import EMPTY, FILE, merge_metadata, own_words, write_model_card
from .tokenizer_length import shorten
from .whole_files import write_whole

if TYPE_CHECKING:
    from transformers import Trainer


def attach_model_card(trainer: Trainer) -> None:
    """From now on this trainer's `create_model_card` and `push_to_hub` write our card, with the training results.

    Trainer writes a card of its own, over whatever is there. Its metadata (datasets, metrics, license) are kept; a card
    that somebody wrote, in the output folder or on the Hub, is merged. The trainer's tokenizer, which it saves beside the
    model, truncates at the model's longest input from now on.

    Raises:
        NotPatchedError: when the trainer's model is not patched.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_patched(model):
        raise NotPatchedError(
            f"attach_model_card() describes synthesized layers, but the trainer's {type(model).__name__} has none. "
            f"Call patch_model() on the model before the Trainer is made."
        )
    shorten(trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None), model)
    create_trainers_card = trainer.create_model_card

    @wraps(create_trainers_card)
    def create_model_card(*args: Any, **kwargs: Any) -> None:
        if not trainer.is_world_process_zero():
            return
        path = Path(str(trainer.args.output_dir)) / FILE
        card = ModelCard(_somebodys_card(path, trainer.hub_model_id) or EMPTY)
        create_trainers_card(*args, **kwargs)
        card.data = merge_metadata(card.data.to_dict(), ModelCard.load(path).data.to_dict())
        write_whole(path, str(card))
        write_model_card(model, path.parent, repo_id=trainer.hub_model_id, trainer=trainer)

    trainer.create_model_card = create_model_card  # type: ignore[method-assign]


def _somebodys_card(path: Path, repo_id: str | None) -> str | None:
    """The card in the folder if somebody wrote in it, else the one on the Hub."""
    local = path.read_text(encoding="utf-8") if path.exists() else None
    if repo_id is not None and (local is None or not own_words(ModelCard(local).text)):
        with suppress(EntryNotFoundError, RepositoryNotFoundError):
            return ModelCard.load(repo_id).content
    return local
