"""What GLUE adds to a conversion: rows that are made up, and classifiers as student and teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidConfigError
from ..tasks.conversion import AVERAGE_BATCHES
from ..tasks.conversion import ConversionArguments as TaskConversionArguments
from .data import DataArguments, arrange
from .model import ModelArguments, load_model, load_stock
from .tasks import Task
from .variation import Rows, is_one_sequence, special_ids, vary


@dataclass
class ConversionArguments(TaskConversionArguments):
    """What becomes of the model's self-attention, and of the rows that teach it."""

    transfer_variation: float = field(
        default=0.75,
        metadata={"help": "The share of its rows that are made up from the training rows, thinned out and mixed."},
    )


def transfer_text(
    rows: Dataset,
    arguments: ConversionArguments,
    data_arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Rows:
    """Rows for the transfer, without labels: as many as its steps see, most of them made up from tokenized rows.

    Raises:
        InvalidConfigError: for a share that is none.
    """
    if not 0 <= arguments.transfer_variation <= 1:
        raise InvalidConfigError(f"--transfer_variation is a share, 0 to 1, not {arguments.transfer_variation}.")
    steps = arguments.transfer_steps + arguments.transfer_answers
    size = max(steps, AVERAGE_BATCHES) * arguments.transfer_batch_size
    rows = rows.shuffle(seed=seed).select(range(min(size, len(rows))))
    if "labels" in rows.column_names:
        rows = rows.remove_columns("labels")
    found = vary(
        list(rows),
        size,
        special_ids(tokenizer),
        share=arguments.transfer_variation,
        max_length=data_arguments.max_length,
        seed=seed,
    )
    for row in filter(is_one_sequence, found):
        arrange(row, tokenizer, data_arguments)
    return found


def load_student_and_teacher(
    model_arguments: ModelArguments, arguments: ConversionArguments, task: Task, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The model, still stock, and the teacher, if one is named."""
    student: Any = load_model(model_arguments, task)
    teacher = load_stock(arguments.teacher, task, device, dtype=model_arguments.dtype) if arguments.teacher else None
    return student.to(device), teacher
