"""Where the data comes from, and whether it can be trained on; every doubt is raised before training starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator
from transformers.utils import logging

from ..errors import DataError
from ..tasks.files import read_files
from .tasks import Task, choices_of, get_task, texts_of

logger = logging.get_logger(__name__)

STSB_RANGE = (0.0, 5.0)
BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[3] / "shared" / "data" / "glue"


@dataclass
class DataArguments:
    """Which rows, and how long."""

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
            "help": "How many tokens a sequence has at most, and so the number of positions of the synthesizers.",
            "aliases": ["--max_seq_length"],
        },
    )
    second_text_at: int | None = field(
        default=None,
        metadata={
            "help": "Where the second text of a pair starts: a shorter first text is padded up to there, before its [SEP]."
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
    """The task, and its checked splits with integer (or float) labels.

    Raises:
        DataError: for an unknown task, a missing file, column or row, or a label that does not fit.
    """
    task = get_task(arguments.task_name) if arguments.task_name else None
    named = {
        "train": arguments.train_file,
        "validation": arguments.validation_file,
        "test": arguments.test_file,
    }
    files = {split: Path(name) for split, name in named.items() if name}
    if files:
        splits = read_files(files)
        task = task or infer_task(splits)
    elif task is None:
        raise DataError(
            "Name the data: --task_name for a task of GLUE or SuperGLUE, or --train_file and --validation_file."
        )
    else:
        folder = arguments.glue_dir or os.environ.get("GLUE_DIR")
        splits = read_folder(Path(folder), task) if folder else read_hub(task)
    limits = {
        "train": arguments.max_train_samples,
        "validation": arguments.max_eval_samples,
        "test": arguments.max_predict_samples,
    }
    checked = DatasetDict()
    for split, rows in splits.items():
        labels_needed = split != "test" and not split.startswith("test_")
        check_columns(task, split, rows, labels_needed)
        limit = limits[split.partition("_")[0]]
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))
        checked[split] = with_label_ids(task, split, rows, labels_needed)
    return task, checked


def read_folder(folder: Path, task: Task) -> dict[str, Dataset]:
    """The splits of `folder/TASK/SPLIT.jsonl`, the layout of the GLUE archive's copies."""
    if not (folder / task.name).is_dir():
        there = (
            ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
            if folder.is_dir()
            else "nothing"
        )
        raise DataError(f"{folder} holds no folder {task.name!r}; it holds {there or 'nothing'}.")
    wanted = ("train", *task.validation)
    optional = tuple(name.replace("validation", "test") for name in task.validation)
    files = {split: folder / task.name / f"{split}.jsonl" for split in (*wanted, *optional)}
    return read_files({split: path for split, path in files.items() if split in wanted or path.is_file()})


def read_hub(task: Task) -> dict[str, Dataset]:
    """The splits from the Hub, and if it cannot be reached from a local folder that is known, with a message."""
    try:
        return dict(load_dataset(task.dataset, task.config))
    except Exception as error:  # offline, unreachable, or without a cached copy: each client has its own error
        if (BESIDE_THE_REPOSITORY / task.name).is_dir():
            logger.warning(f"{task.dataset} cannot be had ({type(error).__name__}): reading {BESIDE_THE_REPOSITORY}.")
            return read_folder(BESIDE_THE_REPOSITORY, task)
        raise DataError(
            f"{task.dataset} ({task.config}) cannot be had from the Hub ({type(error).__name__}): connect, or name local "
            f"data with --glue_dir (or GLUE_DIR) or with --train_file and --validation_file."
        ) from error


def infer_task(splits: dict[str, Dataset]) -> Task:
    """The task that a user's own files describe: `label`, and a text or two."""
    rows = splits.get("train") or next(iter(splits.values()))
    texts = [name for name in rows.column_names if rows.features[name].dtype in ("string", "large_string")]
    fields = tuple(name for name in ("sentence1", "sentence2") if name in texts)
    fields = fields or tuple(name for name in texts if name not in ("label", "idx", "id"))[:2]
    if not fields:
        raise DataError(f"No column holds text: the columns are {', '.join(rows.column_names)}.")
    if "label" not in rows.column_names:
        raise DataError(f"The column 'label' is missing: the columns are {', '.join(rows.column_names)}.")
    feature = rows.features["label"]
    if isinstance(feature, ClassLabel):
        labels: tuple[str, ...] = tuple(feature.names)
    elif "float" in feature.dtype:
        return Task("custom", "custom", "", fields, (), ("pearson", "spearmanr"))
    else:
        labels = tuple(str(value) for value in sorted(set(rows["label"]) - {None}))
    if len(labels) < 2:
        raise DataError(f"The column 'label' holds {len(labels)} class: a classifier needs two or more.")
    return Task("custom", "custom", "", fields, labels, ("accuracy",))


def check_columns(task: Task, split: str, rows: Dataset, labels_needed: bool) -> None:
    """Every column that the task reads is there."""
    for name in (*task.fields, *(["label"] if labels_needed else [])):
        if name not in rows.column_names:
            raise DataError(
                f"The {split} data has no column {name!r}: {task.name} reads {', '.join(task.fields)} and label, found "
                f"{', '.join(rows.column_names)}."
            )
    if not len(rows):
        raise DataError(f"The {split} data has no rows.")


def with_label_ids(task: Task, split: str, rows: Dataset, labels_needed: bool) -> Dataset:
    """The rows with labels as class ids (or floats), each checked."""
    if "label" not in rows.column_names:
        return rows
    feature = rows.features["label"]
    values = rows["label"]
    if isinstance(feature, ClassLabel):
        values = [value if value is None else int(value) for value in values]
    ids = []
    for number, value in enumerate(values):
        if not labels_needed and (value is None or value == -1):
            ids.append(-1.0 if task.regression else -1)
            continue
        ids.append(label_id(task, split, number, value))
    rows = rows.remove_columns("label")
    return rows.add_column("label", ids)


def label_id(task: Task, split: str, number: int, value: Any) -> int | float:
    """One label as the model needs it."""
    where = f"Row {number} of the {split} data has the label {value!r}"
    if task.regression:
        low, high = STSB_RANGE if task.name == "stsb" else (-math.inf, math.inf)
        try:
            score = float(value)
        except (TypeError, ValueError):
            raise DataError(f"{where}: {task.name} needs a number.") from None
        if not low <= score <= high:
            raise DataError(f"{where}: {task.name} has scores from {low:g} to {high:g}.")
        return score
    if isinstance(value, (bool, int)) and task.name != "custom":
        if not 0 <= int(value) < task.num_labels:
            raise DataError(f"{where}: {task.name} has the class ids 0 to {task.num_labels - 1}.")
        return int(value)
    if str(value) in task.labels:
        return task.labels.index(str(value))
    raise DataError(f"{where}: the classes are {', '.join(task.labels)}.")


def tokenize(task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> Dataset:
    """Rows of the model's inputs, and `labels` where the rows are labelled."""
    encode = partial(_encode, task=task, tokenizer=tokenizer, arguments=arguments)
    return rows.map(
        encode, batched=True, remove_columns=rows.column_names, desc="tokenize", load_from_cache_file=False
    )


def _encode(
    columns: dict[str, list[Any]], task: Task, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments
) -> dict[str, list[Any]]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    texts = [pair for row in rows for pair in (choices_of(row) if task.multiple_choice else [texts_of(task, row)])]
    firsts, seconds = [first for first, _ in texts], [second for _, second in texts]
    encoded = dict(
        tokenizer(firsts, None if seconds[0] is None else seconds, truncation=True, max_length=arguments.max_length)
    )
    for number in range(len(texts)):
        arrange({name: values[number] for name, values in encoded.items()}, tokenizer, arguments)
    if task.multiple_choice:
        encoded = {name: [values[i : i + 2] for i in range(0, len(values), 2)] for name, values in encoded.items()}
    if "label" in columns:
        encoded["labels"] = columns["label"]
    return encoded


def arrange(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> None:
    """Pad a tokenized row, in place, as the arguments say: its first text, and its end."""
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
    """Where the first text ends and the second starts; (0, 0) where there is one text."""
    separator = tokenizer.sep_token_id
    if separator is None:
        raise DataError("--second_text_at needs a tokenizer with a token between two texts, and this one has none.")
    end = start = tokens.index(separator)
    while start < len(tokens) and tokens[start] == separator:
        start += 1
    return (end, start) if start < len(tokens) else (0, 0)


def collator(task: Task, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> Callable[[list], dict]:
    """What makes batches of tokenized rows; padding is on the right, where every position keeps its place.

    The tokenizer is saved beside the model, and truncates there as it does here.
    """
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = min(tokenizer.model_max_length, arguments.max_length)
    if arguments.pad_to_max_length:
        return default_data_collator
    if task.multiple_choice:
        return partial(_collate_choices, pad=DataCollatorWithPadding(tokenizer))
    return DataCollatorWithPadding(tokenizer)


def _collate_choices(rows: list[dict[str, Any]], pad: Callable[[list], dict]) -> dict[str, Any]:
    """Every choice is padded like a row of its own, and the choices of a row stand side by side: (B, C, L)."""
    names = [name for name in rows[0] if name != "labels"]
    choices = [{name: row[name][i] for name in names} for row in rows for i in range(len(row[names[0]]))]
    batch = {name: tensor.unflatten(0, (len(rows), -1)) for name, tensor in pad(choices).items()}
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch
