"""What the scripts do before and after a training with Trainer: early checks, and the files beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import create_repo
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_synthesizer.checkpoints.fresh_heads import require_trained_head
from hf_synthesizer.checkpoints.resuming import keep, last_checkpoint, require_own
from hf_synthesizer.errors import InvalidConfigError, first_line


def checkpoint_to_go_on_from(training: TrainingArguments, model: PreTrainedModel, variant: str | None) -> Path | None:
    """The checkpoint of this training, or None. Everything that would stop the training later is checked here.

    Raises:
        InvalidConfigError: for a checkpoint of another model or variant in the output folder, a Hub that cannot be reached,
            or the evaluation of a head that was never trained.
    """
    checkpoint = last_checkpoint(training) if training.do_train else None
    require_own(checkpoint, model, variant)
    if not training.do_train:
        require_trained_head(model, "Without training, the scores judge the head that was loaded")
    require_hub(training)
    return checkpoint


def require_hub(training: TrainingArguments) -> None:
    """Check before the training that the model can be pushed after it."""
    if training.push_to_hub and training.process_index == 0:
        name = training.hub_model_id or Path(str(training.output_dir)).absolute().name
        try:
            create_repo(name, token=training.hub_token, private=training.hub_private_repo, exist_ok=True)
        except Exception as error:  # offline, unreachable, without a token, or not allowed: each has its own error
            raise InvalidConfigError(
                f"--push_to_hub: the repository {name} cannot be made on the Hub ({first_line(error)}). Log in with `hf auth login`, or "
                f"leave the flag out and push later: hf-synthesizer push {training.output_dir} NAME."
            ) from error


def evaluate(
    trainer: Trainer, rows: Any, prefix: str = "eval", also: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Print and save the metrics of a validation set, together with other metrics."""
    found = {**trainer.evaluate(rows, metric_key_prefix=prefix), **(also or {})}
    if isinstance(rows, Dataset):
        found[f"{prefix}_samples"] = len(rows)
    return keep(trainer, prefix, found)


def write_lines(trainer: Trainer, name: str, texts: list[str]) -> None:
    """Write one line for each text beside the model, in one process."""
    if trainer.is_world_process_zero():
        lines = "".join(" ".join(text.split()) + "\n" for text in texts)
        (Path(str(trainer.args.output_dir)) / name).write_text(lines, encoding="utf-8")
