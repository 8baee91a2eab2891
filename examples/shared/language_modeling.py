"""Text for causal and masked language models, in blocks or line by line."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from hf_synthesizer.errors import DataError, InvalidConfigError

from .files import FileArguments, Rows, columns_of, first, load_splits, require_splits

logger = logging.get_logger(__name__)


@dataclass
class LanguageModelArguments(FileArguments):
    """The flags of the text, and the length of blocks."""

    text_column: str | None = field(
        default=None, metadata={"help": "The column of the text; 'text' or the first one."}
    )
    max_length: int = field(
        default=512,
        metadata={
            "help": "The number of tokens of a block, and the number of positions of the synthesizers.",
            "aliases": ["--block_size", "--max_seq_length"],
        },
    )
    streaming: bool = field(default=False, metadata={"help": "Read the data during training; needs --max_steps."})
    validation_split_percentage: int = field(
        default=5,
        metadata={"help": "Without validation data: the share of the training texts that is used instead."},
    )


def load_texts(data: LanguageModelArguments, training: TrainingArguments) -> dict[str, Any]:
    """Load the splits of the arguments. Without validation data, a share of the training texts becomes validation data.

    Raises:
        DataError: if there is no data for one of --do_train and --do_eval.
        InvalidConfigError: for streaming without --max_steps.
    """
    if data.streaming and training.do_train and training.max_steps <= 0:
        raise InvalidConfigError("--streaming does not know how many rows there are: say --max_steps.")
    splits = load_splits(data, streaming=data.streaming)
    if training.do_eval and "validation" not in splits and not data.streaming:
        splits |= cut_off(splits.get("train"), data.validation_split_percentage)
    require_splits(splits, training)
    return splits


def cut_off(rows: Dataset | None, percentage: int) -> dict[str, Dataset]:
    """Split a training set: its first texts are `validation`, the others `train`. Empty without a training set.

    Raises:
        InvalidConfigError: for a share that leaves one of them empty.
    """
    if rows is None:
        return {}
    size = len(rows) * percentage // 100
    if not 0 < size < len(rows):
        raise InvalidConfigError(
            f"--validation_split_percentage {percentage} of {len(rows)} training texts leaves no text on one side: name "
            f"--validation_file, or another share."
        )
    logger.warning(f"No validation data is named: the first {size} of {len(rows)} training texts are kept for it.")
    return {"validation": rows.select(range(size)), "train": rows.select(range(size, len(rows)))}


def encode(
    split: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: LanguageModelArguments,
    *,
    labelled: bool,
    lines: bool = False,
) -> Any:
    """The first rows: blocks of `max_length` tokens, with labels for a causal model, or one row for each line of text.

    Raises:
        DataError: for no text, or less than a block of text.
    """
    columns = columns_of(rows)
    column = data.text_column or ("text" if "text" in columns else columns[0])
    if column not in columns:
        raise DataError(f"The {split} data has no column {column!r}: the columns are {', '.join(columns)}.")
    if not isinstance(next(iter(rows))[column], str):
        raise DataError(f"The column {column!r} of the {split} data holds no text: name --text_column.")
    make = partial(
        _lines if lines else _blocks, column=column, tokenizer=tokenizer, length=data.max_length, labelled=labelled
    )
    options: dict[str, Any] = {}
    if not data.streaming:
        options = {"desc": "tokenize", "load_from_cache_file": False, "num_proc": data.preprocessing_num_workers}
    encoded: Any = rows.map(make, batched=True, remove_columns=columns, **options)
    if not any(True for _ in islice(encoded, 1)):
        raise DataError(
            f"The {split} data is less than one block of {data.max_length} tokens: lower --max_length, or name more text."
        )
    return first(encoded, data.limit(split))


def _lines(
    rows: dict[str, list], column: str, tokenizer: PreTrainedTokenizerBase, length: int, labelled: bool
) -> dict[str, list]:
    texts = [text for text in rows[column] if text and not text.isspace()]
    return _tokens(texts, tokenizer, truncation=True, max_length=length)


def _blocks(
    rows: dict[str, list], column: str, tokenizer: PreTrainedTokenizerBase, length: int, labelled: bool
) -> dict[str, list]:
    """Join all texts, and cut them into blocks. The remainder at the end is dropped."""
    encoded = _tokens([text for text in rows[column] if text], tokenizer, verbose=False)
    joined = {name: [token for row in values for token in row] for name, values in encoded.items()}
    total = len(joined["input_ids"]) // length * length
    blocks = {
        name: [values[start : start + length] for start in range(0, total, length)] for name, values in joined.items()
    }
    if labelled:
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
    return blocks


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> dict[str, list]:
    """The tokens of each text. (A tokenizer fails on an empty list.)"""
    if not texts:
        return {name: [] for name in tokenizer.model_input_names}
    return dict(tokenizer(texts, **options))


def rows_for_transfer(encoded: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """Training rows in random order, for the transfer."""
    rows = encoded.get("train", next(iter(encoded.values())))
    return list(islice(rows.shuffle(seed=seed) if isinstance(rows, Dataset) else rows, size))


def training_rows(encoded: dict[str, Any], data: LanguageModelArguments, training: TrainingArguments) -> Any:
    """The training rows for Trainer. Streamed rows are shuffled here."""
    rows = encoded.get("train") if training.do_train else None
    return rows.shuffle(seed=training.seed, buffer_size=1000) if data.streaming and rows is not None else rows
