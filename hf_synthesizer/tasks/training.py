"""A conversion and a training with Trainer, as all examples have them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import distributed
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..errors import SynthesizerError
from .conversion import ConversionArguments, convert


def run_script(main: Callable[[], Any]) -> None:
    """Run a script's `main` as the program that it is: a user's mistake is one line, several processes leave together."""
    try:
        main()
    except SynthesizerError as error:
        raise SystemExit(f"error: {error}") from None
    leave_together()


def leave_together() -> None:
    """Wait for all processes of a training that has succeeded, and end their group; a process that is alone goes on.

    A thread of gloo lets go of the last exchange's tensors only with the interpreter's lock. A process that ends before is
    aborted ("terminate called without an active exception"), and one that frees the group before waits for ever: it holds
    the lock while it joins the thread. So the lock is left to the thread for a moment.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        time.sleep(0.1)
        distributed.destroy_process_group()


def parse(classes: tuple[Any, ...], argv: list[str]) -> tuple[Any, ...]:
    """The arguments, from flags, or from one JSON file that is named instead."""
    parser = HfArgumentParser(classes)
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(argv[0]))
    return parser.parse_args_into_dataclasses(argv)


def convert_before_training(
    model: PreTrainedModel,
    conversion: ConversionArguments,
    training: TrainingArguments,
    *,
    max_length: int,
    dataloader: Iterable[dict[str, Any]],
    teacher: PreTrainedModel | None = None,
) -> None:
    """Convert the model in place; of several processes the first one makes the transfer, and the others load it."""
    with training.main_process_first(desc="transfer"):
        convert(
            model,
            conversion,
            max_length=max_length,
            dataloader=dataloader,
            teacher=teacher,
            autocast=torch.bfloat16 if training.bf16 else None,
            checkpoint_dir=Path(str(training.output_dir)) / "transfer",
        )


def transfer_batches(rows: Callable[[], Any], conversion: ConversionArguments, collate: Any, seed: int) -> Any:
    """What a conversion looks at: shuffled batches of the rows, which nobody makes where nothing is converted."""
    if conversion.variant is None:
        return ()
    generator = torch.Generator().manual_seed(seed)
    size = conversion.transfer_batch_size
    return DataLoader(rows(), batch_size=size, shuffle=True, generator=generator, collate_fn=collate)


def train(trainer: Trainer) -> dict[str, float]:
    """Train, from the last checkpoint where there is one, and save the model and the metrics."""
    training = trainer.args
    checkpoint = training.resume_from_checkpoint
    if checkpoint is None and os.path.isdir(str(training.output_dir)):
        checkpoint = get_last_checkpoint(str(training.output_dir))
    found = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
    if isinstance(trainer.train_dataset, Dataset):
        found["train_samples"] = len(trainer.train_dataset)
    trainer.save_model()
    keep(trainer, "train", found)
    trainer.save_state()
    return found


def evaluate(trainer: Trainer, rows: Any, prefix: str = "eval") -> dict[str, float]:
    """The metrics of a validation set, printed and saved."""
    found = dict(trainer.evaluate(rows, metric_key_prefix=prefix))
    if isinstance(rows, Dataset):
        found[f"{prefix}_samples"] = len(rows)
    keep(trainer, prefix, found)
    return found


def keep(trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
    """Print metrics, and save them beside the model."""
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)


def write_lines(trainer: Trainer, name: str, texts: list[str]) -> None:
    """One line a text, beside the model; by one process."""
    if trainer.is_world_process_zero():
        lines = "".join(" ".join(text.split()) + "\n" for text in texts)
        (Path(str(trainer.args.output_dir)) / name).write_text(lines, encoding="utf-8")
