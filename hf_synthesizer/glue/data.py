"""Reads, checks and tokenizes the rows of a task, from files, a folder or the Hub. Bad data is refused before training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from ..errors import DataError
from ..transfer.texts import read_files
from .tasks import Task, get_task


def load_task(
    name: str | None = None,
    files: Mapping[str, str | os.PathLike | None] | None = None,
    folder: str | os.PathLike | None = None,
    limits: Mapping[str, int | None] | None = None,
) -> tuple[Task, DatasetDict]:
    """Load a task and its splits with checked labels, from files, `folder/TASK/SPLIT.jsonl` or the Hub.

    The keys of `files` and `limits` (maximum numbers of rows) are `train`, `validation` and `test`. Raises `DataError` for unknown,
    missing or invalid data.
    """
    task = get_task(name) if name else None
    paths = {split: Path(path) for split, path in (files or {}).items() if path}
    if paths:
        splits = read_files(paths)
        task = task or infer_task(splits)
    elif task is None:
        raise DataError(
            "Name the data: --task_name for a task of GLUE or SuperGLUE, or --train_file and --validation_file."
        )
    else:
        folder = folder or os.environ.get("GLUE_DIR")
        splits = read_folder(Path(folder), task) if folder else read_hub(task)
    checked = DatasetDict()
    for split, rows in splits.items():
        kind = split.partition("_")[0]
        checked[split] = checked_rows(task, split, rows, (limits or {}).get(kind), labels_needed=kind != "test")
    return task, checked


def read_folder(folder: Path, task: Task) -> dict[str, Dataset]:
    """Read the splits of `folder/TASK/SPLIT.jsonl`."""
    if not (folder / task.name).is_dir():
        subfolders = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        raise DataError(f"{folder} holds no folder {task.name!r}; it holds {', '.join(subfolders) or 'nothing'}.")
    optional = tuple(name.replace("validation", "test") for name in task.validation)
    files = {split: folder / task.name / f"{split}.jsonl" for split in ("train", *task.validation, *optional)}
    return read_files({split: path for split, path in files.items() if split not in optional or path.is_file()})


def read_hub(task: Task) -> dict[str, Dataset]:
    """Load the splits from the Hub."""
    try:
        return dict(load_dataset(task.dataset, task.config))
    except Exception as error:  # offline, unreachable, or without a cached copy: each client has its own error
        raise DataError(
            f"{task.dataset} ({task.config}) cannot be had from the Hub ({type(error).__name__}): connect, or name local "
            f"data with --glue_dir (or GLUE_DIR) or with --train_file and --validation_file."
        ) from error


def infer_task(splits: Mapping[str, Dataset]) -> Task:
    """Describe the task of a user's files: a column `label`, and one or two text columns."""
    rows = splits.get("train") or next(iter(splits.values()))
    texts = [name for name in rows.column_names if rows.features[name].dtype in ("string", "large_string")]
    fields = tuple(name for name in ("sentence1", "sentence2") if name in texts)
    fields = fields or tuple(name for name in texts if name not in ("label", "idx", "id"))[:2]
    if not fields:
        raise DataError(f"No column holds text: the columns are {', '.join(rows.column_names)}.")
    if "label" not in rows.column_names:
        raise DataError(f"The column 'label' is missing: the columns are {', '.join(rows.column_names)}.")
    feature = rows.features["label"]
    if "float" in feature.dtype:
        return Task("custom", "custom", "", fields, (), ("pearson", "spearmanr"))
    names = feature.names if isinstance(feature, ClassLabel) else map(str, sorted(set(rows["label"]) - {None}))
    labels = tuple(names)
    if len(labels) < 2:
        raise DataError(f"The column 'label' holds {len(labels)} class: a classifier needs two or more.")
    return Task("custom", "custom", "", fields, labels, ("accuracy",))


def checked_rows(task: Task, split: str, rows: Dataset, limit: int | None, *, labels_needed: bool) -> Dataset:
    """Check the first `limit` rows, and turn labels into class ids (or floats). A missing label of a row for prediction is -1."""
    for name in (*task.fields, *(["label"] if labels_needed else [])):
        if name not in rows.column_names:
            raise DataError(
                f"The {split} data has no column {name!r}: {task.name} reads {', '.join(task.fields)} and label, found "
                f"{', '.join(rows.column_names)}."
            )
    if not len(rows):
        raise DataError(f"The {split} data has no rows.")
    rows = rows if limit is None else rows.select(range(min(limit, len(rows))))
    if "label" not in rows.column_names:
        return rows
    values = rows["label"]
    if isinstance(rows.features["label"], ClassLabel):
        values = [value if value is None else int(value) for value in values]
    missing = -1.0 if task.regression else -1
    ids = [
        missing if not labels_needed and value in (None, -1) else label_id(task, split, number, value)
        for number, value in enumerate(values)
    ]
    return rows.remove_columns("label").add_column("label", ids)


def label_id(task: Task, split: str, number: int, value: Any) -> int | float:
    """Check one label, and turn it into a class id or a score."""
    where = f"Row {number} of the {split} data has the label {value!r}"
    if task.regression:
        low, high = (0.0, 5.0) if task.name == "stsb" else (float("-inf"), float("inf"))
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


def texts_of(task: Task, row: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The (text, pair) of a row; pair may be None. COPA has two: the premise with its question, and each answer."""
    values = [row[name] for name in task.fields]
    if task.multiple_choice:
        question = "What was the cause of this?" if row["question"] == "cause" else "What happened as a result?"
        return [(f"{row['premise']} {question}", row[choice]) for choice in ("choice1", "choice2")]
    if task.name == "wic":
        return [(f"{values[0]}: {values[1]}", values[2])]
    return [(values[0], values[1] if len(values) > 1 else None)]


def tokenize_task(
    task: Task,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    arrange: Callable[[dict[str, list[int]]], None] | None = None,
) -> Dataset:
    """Tokenize rows to the model's inputs, with `labels` if there are any. `arrange` may change each tokenized text in place."""

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        table = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        firsts, seconds = zip(*(pair for row in table for pair in texts_of(task, row)), strict=True)
        pairs = None if seconds[0] is None else list(seconds)
        encoded = dict(tokenizer(list(firsts), pairs, truncation=True, max_length=max_length))
        for number in range(len(firsts)):
            if arrange is not None:
                arrange({name: values[number] for name, values in encoded.items()})
        if task.multiple_choice:
            encoded = {name: [values[i : i + 2] for i in range(0, len(values), 2)] for name, values in encoded.items()}
        return encoded | ({"labels": columns["label"]} if "label" in columns else {})

    return rows.map(
        encode, batched=True, remove_columns=rows.column_names, desc="tokenize", load_from_cache_file=False
    )


def collator_for(task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Callable[[list], dict]:
    """Make the collator for tokenized rows."""
    tokenizer.padding_side = "right"  # so columns are positions
    tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)
    pad = DataCollatorWithPadding(tokenizer)
    return partial(_collate_choices, pad=pad) if task.multiple_choice else pad


def _collate_choices(rows: list[dict[str, Any]], pad: Callable[[list], dict]) -> dict[str, Any]:
    """Pad all choices to one length, and stack the choices of each row: (B, C, L)."""
    names = [name for name in rows[0] if name != "labels"]
    choices = [{name: row[name][i] for name in names} for row in rows for i in range(len(row[names[0]]))]
    batch = {name: tensor.unflatten(0, (len(rows), -1)) for name, tensor in pad(choices).items()}
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch
