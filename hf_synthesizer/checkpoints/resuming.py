"""Resumes a training with Trainer from the last checkpoint of its output folder, if it is one of this training."""

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
"""Sizes that are the same in all checkpoints of one training."""


def last_checkpoint(training: TrainingArguments) -> Path | None:
    """The checkpoint from which a training goes on: the named one, or the last one of the output folder.

    Raises:
        InvalidConfigError: for a checkpoint that is not there.
    """
    named, folder = training.resume_from_checkpoint, str(training.output_dir)
    if named is not None and named not in ("True", "true", True):
        if not (Path(str(named)) / TRAINER_STATE_NAME).is_file():
            raise InvalidConfigError(f"--resume_from_checkpoint {named} is no folder with a {TRAINER_STATE_NAME}.")
        return Path(str(named))
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if named is not None and last is None:
        raise InvalidConfigError(f"--resume_from_checkpoint: {folder} has no checkpoint.")
    return None if last is None else Path(last)


def require_own(checkpoint: Path | None, model: PreTrainedModel, variant: str | None) -> None:
    """Check that a checkpoint can be one of this training: the same kind and size of model, the same variant.

    Args:
        checkpoint: the folder; None where a training begins.
        model: before its conversion.
        variant: it will have; None to leave it as it is.

    Raises:
        InvalidConfigError: if it cannot.
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
    theirs, ours = _variants(saved), {variant} if variant else _variants(wanted)
    if not different and theirs != ours:
        descriptions = [" and ".join(sorted(names)) or "stock attention" for names in (theirs, ours)]
        different = [f"{descriptions[0]} there, {descriptions[1]} here"]
    if different:
        raise InvalidConfigError(
            f"{checkpoint} is of another training ({'; '.join(different)}), so that this one cannot go on from it: name "
            f"another --output_dir, or delete what is in this one."
        )


def _variants(config: dict) -> set[str]:
    """All variants in the settings of a patch."""
    return set(re.findall(r'"variant": "([^"]+)"', json.dumps(config.get("synthesizer"))))


def train_from(trainer: Trainer, checkpoint: Path | None) -> dict[str, float]:
    """Train, from a checkpoint if there is one, and print and save the metrics. The model is not saved.

    If the training has ended, its last checkpoint is loaded, and there are no metrics.
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
    metrics = dict(trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint)).metrics)
    if hasattr(trainer.train_dataset, "__len__"):
        metrics["train_samples"] = len(trainer.train_dataset)  # type: ignore[arg-type]
    trainer.save_state()
    return keep(trainer, "train", metrics)


def has_ended(trainer: Trainer, checkpoint: Path) -> bool:
    """Whether a checkpoint has all steps of the training."""
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
