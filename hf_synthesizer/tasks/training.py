"""A conversion and a training with Trainer, as all examples have them."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from huggingface_hub import create_repo
from torch import distributed
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

from ..errors import InvalidConfigError, SynthesizerError, first_line
from .conversion import ConversionArguments, convert, require_trained_head
from .resuming import has_ended, last_checkpoint, require_own

logger = logging.get_logger(__name__)


def run_script(main: Callable[[], Any]) -> None:
    """Run a script's `main` as the program that it is: a user's mistake is one line, several processes leave together."""
    try:
        main()
    except SynthesizerError as error:
        first = os.environ.get("RANK", "0") == "0"  # of several processes one says it
        raise SystemExit(f"error: {error}" if first else 1) from None
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
    """The arguments, from flags, or from one JSON file that is named instead.

    Raises:
        InvalidConfigError: for a flag that there is not, and a value that it cannot have.
    """
    # Each flag with an underscore has a twin with a hyphen: the beginning of one would be that of two.
    parser = _Parser(classes, allow_abbrev=False)
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(argv[0]))
    *found, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
        raise InvalidConfigError(
            f"There is no {flag}{f'; did you mean {near[0]}?' if near else ': --help lists all.'}"
        )
    return tuple(found)


class _Parser(HfArgumentParser):
    """One sentence for a mistake, instead of all flags before it."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message[:1].upper()}{message[1:]}; --help says more.")


def convert_before_training(
    model: PreTrainedModel,
    conversion: ConversionArguments,
    training: TrainingArguments,
    *,
    max_length: int,
    dataloader: Iterable[dict[str, Any]],
    teacher: PreTrainedModel | None = None,
) -> None:
    """Convert the model in place; of several processes the first one makes the transfer, and the others load it.

    Whatever would stop the training after it is looked at first.

    Raises:
        InvalidConfigError: for a checkpoint in the output folder of another model or variant, a Hub that cannot be reached, and a
            head that is to be judged and was never trained. And what `convert` raises.
    """
    checkpoint = last_checkpoint(training) if training.do_train else None
    if checkpoint is not None:
        require_own(checkpoint, model, conversion.variant)
    if not training.do_train:
        require_trained_head(model, "Without training, the scores judge the head that was loaded")
    _require_hub(training)
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


def _require_hub(training: TrainingArguments) -> None:
    """Whether what is to be pushed can be: better known before a training than after it."""
    if training.push_to_hub and training.process_index == 0:
        name = training.hub_model_id or Path(str(training.output_dir)).absolute().name
        try:
            create_repo(name, token=training.hub_token, private=training.hub_private_repo, exist_ok=True)
        except Exception as error:  # offline, unreachable, without a token, or not allowed: each has its own error
            raise InvalidConfigError(
                f"--push_to_hub: the repository {name} cannot be made on the Hub ({first_line(error)}). Log in with `hf auth login`, or "
                f"leave the flag out and push later: hf-synthesizer push {training.output_dir} NAME."
            ) from error


def transfer_batches(rows: Callable[[], Any], conversion: ConversionArguments, collate: Any, seed: int) -> Any:
    """What a conversion looks at: shuffled batches of the rows, which nobody makes where nothing is converted."""
    if conversion.variant is None:
        return ()
    generator = torch.Generator().manual_seed(seed)
    size = conversion.transfer_batch_size
    return DataLoader(rows(), batch_size=size, shuffle=True, generator=generator, collate_fn=collate)


def train(trainer: Trainer) -> dict[str, float]:
    """Train, from the last checkpoint where there is one, and save the model and the metrics.

    A training that has ended is not begun again: its last checkpoint is loaded.
    """
    training = trainer.args
    checkpoint = last_checkpoint(training)
    if checkpoint is not None and has_ended(trainer, checkpoint):
        logger.warning(
            f"{checkpoint} is the end of this training, and is loaded. To train anew, name another --output_dir; to train on, "
            f"more steps or epochs."
        )
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.save_model()
        return {}
    if checkpoint is not None:
        logger.warning(f"The training goes on from {checkpoint}. To train anew, name another --output_dir.")
    found = dict(trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint)).metrics)
    if isinstance(trainer.train_dataset, Dataset):
        found["train_samples"] = len(trainer.train_dataset)
    trainer.save_model()
    keep(trainer, "train", found)
    trainer.save_state()
    return found


def evaluate(
    trainer: Trainer, rows: Any, prefix: str = "eval", also: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The metrics of a validation set, printed and saved, and others that were made elsewhere with them."""
    found = {**trainer.evaluate(rows, metric_key_prefix=prefix), **(also or {})}
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
