"""Load the text of a task from files, a folder, parallel text, or a data set of the Hub. Unclear arguments are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset, load_dataset
from transformers import TrainingArguments

from hf_synthesizer.errors import DataError
from hf_synthesizer.transfer.texts import TABLES, read_files

TEXTS = {**TABLES, "txt": "text", "text": "text"}
"""What files with columns or with plain lines end in, and who reads them."""
SPLITS = {"train": ("train",), "validation": ("valid", "val", "dev"), "test": ("test",)}
"""What the files of a folder have in their names."""

Rows: TypeAlias = Dataset | IterableDataset


@dataclass
class FileArguments:
    """The flags of the data."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "A data set of the Hub, or a folder with one file for each of train, validation and test."},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of that data set."})
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "A csv, json, jsonl, parquet or txt file; for translation also NAME for NAME.de and NAME.en."
        },
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    test_file: str | None = field(default=None, metadata={"help": "The same for prediction."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on at most so many rows, blocks or replies."}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on at most so many."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Test on at most so many."})
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "The number of processes that tokenize."}
    )

    def files(self) -> dict[str, Path]:
        """The files of the flags, by split."""
        named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: Path(name) for split, name in named.items() if name}

    def limit(self, split: str) -> int | None:
        """The maximum number of rows of a split."""
        limits = {
            "train": self.max_train_samples,
            "validation": self.max_eval_samples,
            "test": self.max_predict_samples,
        }
        return limits.get(split)


def load_splits(
    arguments: FileArguments, *, languages: tuple[str, str] | None = None, streaming: bool = False
) -> dict[str, Any]:
    """Load the splits that the arguments name, with all rows. `first` limits their number later.

    Args:
        arguments: the flags of the data.
        languages: the endings of the two files of parallel text. Each row is then `{"translation": {language: text}}`.
        streaming: whether to read the data during training, and not before.

    Raises:
        DataError: if no data is named, or if it cannot be read.
    """
    files = arguments.files()
    if arguments.dataset_name and files:
        raise DataError("Name the data once: --dataset_name, or --train_file and --validation_file.")
    if not arguments.dataset_name and not files:
        raise DataError(
            "Name the data: --dataset_name (of the Hub, or a folder), or --train_file and --validation_file."
        )
    if arguments.dataset_name and not Path(arguments.dataset_name).is_dir():
        splits = read_hub(arguments.dataset_name, arguments.dataset_config_name, streaming=streaming)
    else:
        files = files or files_of(Path(str(arguments.dataset_name)), languages)
        parallel = {split: path for split, path in files.items() if languages and is_parallel(path, languages)}
        tables = {split: path for split, path in files.items() if split not in parallel}
        for path in tables.values():
            _require_both(path, languages or ())
        splits = read_files(tables, TEXTS, streaming=streaming)
        splits |= {split: read_parallel(path, languages) for split, path in parallel.items() if languages}
    return splits


def files_of(folder: Path, languages: tuple[str, str] | None = None) -> dict[str, Path]:
    """The files of a folder by split: one whose name contains `train`, one with `valid`, `val` or `dev`, and one with `test`.

    Raises:
        DataError: if several files match a split, or none matches any.
    """
    endings = [f".{ending}" for ending in TEXTS]
    names = {path for path in folder.iterdir() if path.suffix in endings}
    if languages:
        names |= {path.with_suffix("") for path in folder.iterdir() if is_parallel(path.with_suffix(""), languages)}
    found = {}
    for split, words in SPLITS.items():
        paths = sorted(path for path in names if any(word in path.name for word in words))
        if len(paths) > 1:
            listed = ", ".join(path.name for path in paths)
            raise DataError(f"{folder} has several files for {split} ({listed}): name --{split}_file and the others.")
        if paths:
            found[split] = paths[0]
    if not found:
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise DataError(f"{folder} has no file for train, validation or test; it holds {there}.")
    return found


def is_parallel(path: Path, languages: tuple[str, str]) -> bool:
    """Whether the name stands for two files, one for each language."""
    return not path.is_file() and all(_in_language(path, language).is_file() for language in languages)


def _in_language(path: Path, language: str) -> Path:
    return path.with_name(f"{path.name}.{language}")


def _require_both(path: Path, languages: Sequence[str]) -> None:
    """Check that parallel text has two files, and that the flag names them without their languages.

    Raises:
        DataError: if a file is missing, or if the flag names only one file.
    """
    there = [language for language in languages if _in_language(path, language).is_file()]
    if there and not path.is_file():
        missing = next(language for language in languages if language not in there)
        raise DataError(
            f"{_in_language(path, missing)} does not exist, the translation of {_in_language(path, there[0])}."
        )
    if path.suffix.lstrip(".") in languages:
        raise DataError(f"{path} is one side of parallel text: name both by {path.with_suffix('')}.")


def read_parallel(path: Path, languages: tuple[str, str]) -> Dataset:
    """Read two files with the same number of lines as rows of `translation`.

    Raises:
        DataError: if the numbers of lines differ.
    """
    sides = [_in_language(path, language).read_text(encoding="utf-8").splitlines() for language in languages]
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise DataError(
            f"{path} has {len(sides[0])} lines in {languages[0]} and {len(sides[1])} in {languages[1]}: each line needs its "
            f"translation."
        )
    return Dataset.from_dict(
        {"translation": [dict(zip(languages, pair, strict=True)) for pair in zip(*sides, strict=True)]}
    )


def read_hub(name: str, config: str | None, *, streaming: bool = False) -> dict[str, Any]:
    """Load the splits of a data set of the Hub.

    Raises:
        DataError: if it cannot be loaded.
    """
    try:
        return dict(load_dataset(name, config, streaming=streaming))
    except Exception as error:  # offline, unreachable, unknown, or without a cached copy: each has its own error
        raise DataError(
            f"{name} cannot be had from the Hub ({type(error).__name__}), and no folder has that name: connect, or name "
            f"local data with --train_file and --validation_file."
        ) from error


def first(rows: Rows, limit: int | None) -> Any:
    """The first rows, up to the limit.

    Raises:
        DataError: for a limit that leaves no row.
    """
    if limit is None:
        return rows
    if limit < 1:
        raise DataError(f"{limit} rows are none: give a --max_…_samples of 1 or more, or leave it out.")
    return rows.take(limit) if isinstance(rows, IterableDataset) else rows.select(range(min(limit, len(rows))))


def columns_of(rows: Rows) -> list[str]:
    """The names of the columns, also of streamed data."""
    return rows.column_names or list(next(iter(rows)))


def require_splits(splits: Mapping[str, Any], training: TrainingArguments) -> None:
    """Check that there is data for each of --do_train, --do_eval and --do_predict.

    Raises:
        DataError: if data is missing.
    """
    asked = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    flags = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}
    for split, wanted in asked.items():
        if wanted and split not in splits:
            there = ", ".join(splits)
            raise DataError(f"--{flags[split]} needs {split} data, and there is only {there}: name --{split}_file.")
    if not any(asked.values()):
        raise DataError("Say what to do: --do_train, --do_eval, --do_predict, or several of them.")
