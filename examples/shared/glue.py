"""The flags, data, model and metrics of the GLUE examples."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from evaluate.utils.logging import get_logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase, default_data_collator
from transformers.utils import logging

from hf_synthesizer.errors import DataError, InvalidConfigError
from hf_synthesizer.glue.data import collator_for, load_task, tokenize_task
from hf_synthesizer.glue.run import load_model
from hf_synthesizer.glue.tasks import SUPER_GLUE, Task, get_task, official_metrics
from hf_synthesizer.transfer.variation import Rows, is_one_sequence, rows_for_transfer, special_ids

from .conversion import ConversionArguments
from .model import ModelArguments

logger = logging.get_logger(__name__)
get_logger("evaluate").setLevel("ERROR")

BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[3] / "shared" / "data" / "glue"


@dataclass
class ClassifierArguments(ModelArguments):
    """The flags of the model."""

    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Start a head of another size afresh instead of failing."}
    )


@dataclass
class ClassifierConversionArguments(ConversionArguments):
    """The flags of the conversion, and of the rows for the transfer."""

    transfer_variation: float = field(
        default=0.75,
        metadata={"help": "The share of rows for the transfer that are made up from training rows."},
    )

    def require_consistent(self) -> None:
        super().require_consistent()
        if not 0 <= self.transfer_variation <= 1:
            raise InvalidConfigError(f"--transfer_variation is a share, 0 to 1, not {self.transfer_variation}.")


@dataclass
class DataArguments:
    """The flags of the data, and the lengths."""

    task_name: str | None = field(
        default=None, metadata={"help": "A task of GLUE or SuperGLUE, such as mrpc or boolq.", "aliases": ["--task"]}
    )
    glue_dir: str | None = field(
        default=None,
        metadata={"help": "A local folder with TASK/train.jsonl and so on; the variable GLUE_DIR is its default."},
    )
    train_file: str | None = field(default=None, metadata={"help": "A csv, json, jsonl or parquet file of your own."})
    validation_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    test_file: str | None = field(default=None, metadata={"help": "The same for prediction; labels are not needed."})
    max_length: int = field(
        default=128,
        metadata={
            "help": "The maximum number of tokens of a sequence, and the number of positions of the synthesizers.",
            "aliases": ["--max_seq_length"],
        },
    )
    second_text_at: int | None = field(
        default=None,
        metadata={
            "help": "The position of the second text of a pair. A shorter first text is padded up to it, before its [SEP]."
        },
    )
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad every sequence to max_length, not to its batch."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use that many training rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use that many validation rows."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Use that many test rows."})
    local_metrics: bool = field(
        default=False, metadata={"help": "Compute the metrics with scikit-learn and SciPy, without asking the Hub."}
    )


def load_data(arguments: DataArguments) -> tuple[Task, DatasetDict]:
    """Load the task and its checked splits with integer (or float) labels.

    Raises:
        DataError: for an unknown task, a missing file, column or row, or a label that does not fit.
    """
    files = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
    limits = {
        "train": arguments.max_train_samples,
        "validation": arguments.max_eval_samples,
        "test": arguments.max_predict_samples,
    }
    folder = arguments.glue_dir or os.environ.get("GLUE_DIR")
    try:
        return load_task(arguments.task_name, files, folder, limits)
    except DataError as error:
        if folder or error.__cause__ is None or any(files.values()):  # the Hub was not asked, or has an answer
            raise
        if not (BESIDE_THE_REPOSITORY / get_task(str(arguments.task_name)).name).is_dir():
            raise
        logger.warning(f"{error} Reading {BESIDE_THE_REPOSITORY}.")
        return load_task(arguments.task_name, folder=BESIDE_THE_REPOSITORY, limits=limits)


def tokenize(task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> Dataset:
    """Rows of the model's inputs, with `labels` if there are any."""
    place = partial(arrange, tokenizer=tokenizer, arguments=arguments)
    return tokenize_task(task, rows, tokenizer, arguments.max_length, place)


def arrange(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> None:
    """Pad a tokenized row in place, after its first text and at its end, as the arguments say."""
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "attention_mask": 0}
    room = arguments.max_length - len(row["input_ids"])
    gaps = [(len(row["input_ids"]), room if arguments.pad_to_max_length else 0)]
    if arguments.second_text_at is not None:
        end, start = between_texts(row["input_ids"], tokenizer)
        gap = max(0, min(arguments.second_text_at - start, room)) if start else 0
        gaps = [(gaps[0][0], max(0, gaps[0][1] - gap)), (end, gap)]
    for name, values in row.items():
        for place, count in gaps:
            values[place:place] = [padding[name]] * count


def between_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The end of the first text and the start of the second. (0, 0) if there is one text."""
    separator = tokenizer.sep_token_id
    if separator is None:
        raise DataError("--second_text_at needs a tokenizer with a token between two texts, and this one has none.")
    end = start = tokens.index(separator)
    while start < len(tokens) and tokens[start] == separator:
        start += 1
    return (end, start) if start < len(tokens) else (0, 0)


def collator(task: Task, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> Callable[[list], dict]:
    """Make the collator for tokenized rows. It pads on the right, so columns are positions."""
    pad = collator_for(task, tokenizer, arguments.max_length)
    return default_data_collator if arguments.pad_to_max_length else pad


def transfer_text(
    rows: Dataset,
    arguments: ClassifierConversionArguments,
    data_arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Rows:
    """Rows without labels for the steps of the transfer. Most are made up from tokenized rows."""
    share, length = arguments.transfer_variation, data_arguments.max_length
    found = rows_for_transfer(rows, arguments.rows, special_ids(tokenizer), length, seed, share=share)
    for row in filter(is_one_sequence, found):
        arrange(row, tokenizer, data_arguments)
    return found


def load_student_and_teacher(
    model_arguments: ClassifierArguments, arguments: ConversionArguments, task: Task, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load the model, which is still stock, and the teacher, if a flag names one."""
    student: Any = load_classifier(model_arguments, task).to(device)
    if not arguments.teacher:
        return student, None
    return student, load_model(arguments.teacher, task, what="teacher", dtype=model_arguments.dtype).to(device)


def load_classifier(arguments: ClassifierArguments, task: Task) -> PreTrainedModel:
    """Load the model that the flags name, with a head for the task."""
    return load_model(
        arguments.model_name_or_path,
        task,
        config_name=arguments.config_name,
        dtype=arguments.dtype,
        ignore_mismatched_sizes=arguments.ignore_mismatched_sizes,
        **arguments.download_options(),
    )


class LocalGlueMetric(evaluate.Metric):
    """The metrics of `evaluate.load("glue", task)` by scikit-learn and SciPy, for machines without a network."""

    def __init__(self, task: Task, **kwargs: Any):
        self.task = task
        super().__init__(config_name=task.config, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        kind = "float32" if self.task.regression else "int64"
        return evaluate.MetricInfo(
            description="The official metrics of GLUE and SuperGLUE.",
            citation="",
            inputs_description="predictions: class ids, or numbers for a regression; references: the same.",
            features=datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)}),
        )

    def _compute(self, predictions: Any, references: Any, **kwargs: Any) -> dict[str, float]:
        return official_metrics(self.task, np.asarray(predictions), np.asarray(references))


def load_metric(task: Task, *, network: bool = True) -> evaluate.Metric:
    """Load the metric of a task from the Hub. Without `network`, or (with a message) without the Hub, it is the local metric."""
    if network and task.name != "custom":
        name = "super_glue" if task.dataset == SUPER_GLUE else "glue"
        try:
            return evaluate.load(name, task.config)
        except Exception as error:  # whatever the network, the Hub or the sandbox of the script did
            logger.warning(
                f"evaluate.load({name!r}, {task.config!r}) did not work ({type(error).__name__}): computing the same "
                f"metrics with scikit-learn and SciPy instead."
            )
    return LocalGlueMetric(task)
