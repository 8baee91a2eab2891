"""Reads texts from plain files and tables, and makes batches from them for transfers and suggestions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DataError, InvalidConfigError, first_line

TABLES = {"csv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet"}
"""The endings of files with columns, and the reader of `datasets` for each."""


def read_texts(path: Path, column: str = "text") -> list[str]:
    """The texts of a file: its lines, or in a `.jsonl` file the column of each line. Empty texts are left out.

    Raises:
        InvalidConfigError: for a file without texts, or without that column.
        OSError: for a file that cannot be read.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        lines = [_read_column(path, number, line, column) for number, line in enumerate(lines, start=1)]
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise InvalidConfigError(f"{path} holds no text: write one text on each line.")
    return texts


def _read_column(path: Path, number: int, line: str, column: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidConfigError(f"Line {number} of {path} is no JSON ({error}).") from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InvalidConfigError(f"Line {number} of {path} has no text in the column {column!r}; it has {columns}.")
    return row[column]


def read_files(files: Mapping[str, Path], readers: Mapping[str, str] = TABLES, *, streaming: bool = False) -> dict:
    """Read the splits from files. Each file must exist, have a known ending and at least one row.

    Raises:
        DataError: for any other file.
    """
    from datasets import load_dataset  # an optional dependency, not needed for plain texts

    splits = {}
    for split, path in files.items():
        kind = readers.get(path.suffix.lstrip("."))
        if kind is None:
            *others, last = sorted(readers)
            raise DataError(f"{path} ends in {path.suffix!r}: {', '.join(others)} and {last} can be read.")
        if not path.is_file():
            raise DataError(f"{path} does not exist.")
        with path.open("rb") as file:
            if kind != "parquet" and not any(map(bytes.strip, file)):
                raise DataError(f"{path} is empty.")
        options: dict[str, Any] = {"keep_linebreaks": True} if kind == "text" else {}
        try:
            splits[split] = load_dataset(kind, data_files=str(path), split="train", streaming=streaming, **options)
            empty = not any(True for _ in islice(splits[split], 1))
        except Exception as error:  # each reader has errors of its own
            reason = first_line(error.__cause__ or error)
            if "corresponds to no data" in reason:
                raise DataError(f"{path} has no rows.") from error
            raise DataError(f"{path} cannot be read as {kind}: {reason}") from error
        if empty:
            raise DataError(f"{path} has no rows.")
    return splits


def text_batches(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    batch_size: int = 32,
    max_length: int | None = None,
    seed: int = 0,
) -> DataLoader:
    """Shuffled batches of a model's inputs, padded on the right and truncated to `max_length` or the tokenizer's maximum.

    For an encoder-decoder, the labels are the inputs: its decoder needs some text to run.

    Raises:
        InvalidConfigError: without texts, or for a tokenizer that cannot pad.
    """
    if not texts:
        raise InvalidConfigError("There are no texts. Give at least one.")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InvalidConfigError("The tokenizer has no token for padding: set tokenizer.pad_token.")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"

    def collate(rows: list[str]) -> dict[str, Any]:
        inputs = dict(tokenizer(rows, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))
        if model.config.is_encoder_decoder:
            inputs["labels"] = inputs["input_ids"]
        return inputs

    generator = torch.Generator().manual_seed(seed)
    return DataLoader(list(texts), batch_size=batch_size, shuffle=True, generator=generator, collate_fn=collate)  # type: ignore[arg-type]
