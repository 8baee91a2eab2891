"""Where a training with Trainer goes on: from the last checkpoint of its output folder, if that is one of its own."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import CONFIG_NAME, logging

from ..errors import InvalidConfigError

logger = logging.get_logger(__name__)

SIZES = ("hidden_size", "d_model", "n_embd", "num_hidden_layers", "num_layers", "n_layer", "vocab_size")
"""What two models of one training have in common, as far as their config names it."""


def last_checkpoint(training: TrainingArguments) -> Path | None:
    """Where a training goes on: the checkpoint that is named, or the last one of the output folder.

    Raises:
        InvalidConfigError: for a checkpoint that is not there.
    """
    named, folder = training.resume_from_checkpoint, str(training.output_dir)
    if named is not None and named not in ("True", "true", True):
        if not (Path(str(named)) / TRAINER_STATE_NAME).is_file():
            raise InvalidConfigError(f"--resume_from_checkpoint {named} is no folder with a {TRAINER_STATE_NAME}.")
        return Path(str(named))
    found = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if named is not None and found is None:
        raise InvalidConfigError(f"--resume_from_checkpoint: {folder} has no checkpoint.")
    return None if found is None else Path(found)


def require_own(checkpoint: Path | None, model: PreTrainedModel, variant: str | None) -> None:
    """Whether a checkpoint can be one of this training: of the same kind and size of model, of the same variant.

    Args:
        checkpoint: the folder; None where a training begins.
        model: before its conversion.
        variant: it will have; None to leave it as it is.

    Raises:
        InvalidConfigError: where it can not.
    """
    path = (checkpoint or Path()) / CONFIG_NAME
    if checkpoint is None or not path.is_file():
        return
    saved, wanted = json.loads(path.read_text(encoding="utf-8")), model.config.to_dict()
    kinds = [config["model_type"].removeprefix("synthesizer_") for config in (saved, wanted)]
    different = [
        f"{name} {saved.get(name)} there, {wanted[name]} here"
        for name in SIZES
        if name in wanted and saved.get(name) != wanted[name]
    ]
    if kinds[0] != kinds[1]:
        different = [f"a {kinds[0]} there, a {kinds[1]} here"]
    found, ours = _variants(saved), {variant} if variant else _variants(wanted)
    if not different and found != ours:
        said = [" and ".join(sorted(names)) or "stock attention" for names in (found, ours)]
        different = [f"{said[0]} there, {said[1]} here"]
    if different:
        raise InvalidConfigError(
            f"{checkpoint} is of another training ({'; '.join(different)}), so that this one cannot go on from it: name "
            f"another --output_dir, or delete what is in this one."
        )


def _variants(config: dict) -> set[str]:
    """Every variant that is named anywhere in the settings of a patch."""
    return set(re.findall(r'"variant": "([^"]+)"', json.dumps(config.get("synthesizer"))))


def train_from(trainer: Trainer, checkpoint: Path | None) -> dict[str, float]:
    """Train, from a checkpoint where there is one, and print and save the metrics; the model is left to be saved.

    A training that has ended is not begun again: its last checkpoint is loaded, and there are no metrics.
    """
    if checkpoint is not None and has_ended(trainer, checkpoint):
        logger.warning(
            f"{checkpoint} is the end of this training, and is loaded. To train anew, name another --output_dir; to train on, "
            f"more steps or epochs."
        )
        model: PreTrainedModel = trainer.model  # type: ignore[assignment]
        model.load_state_dict(type(model).from_pretrained(checkpoint).state_dict())
        return {}
    if checkpoint is not None:
        logger.warning(f"The training goes on from {checkpoint}. To train anew, name another --output_dir.")
    found = dict(trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint)).metrics)
    if hasattr(trainer.train_dataset, "__len__"):
        found["train_samples"] = len(trainer.train_dataset)  # type: ignore[arg-type]
    trainer.save_state()
    return keep(trainer, "train", found)


def has_ended(trainer: Trainer, checkpoint: Path) -> bool:
    """Whether a checkpoint has all steps that are asked for."""
    done = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
    training = trainer.args
    if training.max_steps > 0:
        return done >= training.max_steps
    batches = math.ceil(len(trainer.get_train_dataloader()) / training.gradient_accumulation_steps)
    return done >= math.ceil(training.num_train_epochs * batches)


def keep(trainer: Trainer, name: str, metrics: dict[str, float]) -> dict[str, float]:
    """Print metrics, save them beside the model, and give them back."""
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)
    return metrics
