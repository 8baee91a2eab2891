"""A tiny model, and tiny data of every task, for the tests of the GLUE examples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import BertModel, BertTokenizerFast

from hf_synthesizer.glue.tasks import TASKS, Task
from tests.helpers.models import bert_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = ["good", "bad", "film", "plot", "the", "a", "is", "was", "very", "not", "and", "actor", "scene", ".", "?"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
GOOD = {"sentence1": "good", "sentence2": "bad", "label": 1}


def write_model(folder: Path) -> Path:
    """A tiny BERT with a tokenizer."""
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(bert_config(vocab_size=len(VOCABULARY))).save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> Path:
    """All tasks in the layout of the GLUE archive's copies: 24 rows to train on, 11 to validate on."""
    for task in TASKS.values():
        (folder / task.name).mkdir()
        tests = [name.replace("validation", "test") for name in task.validation]
        sizes = {"train": 24, **dict.fromkeys(task.validation, 11), **dict.fromkeys(tests, 5)}
        for seed, (split, count) in enumerate(sizes.items()):
            rows = [
                row_of(task, number, first, second)
                for number, (first, second) in enumerate(zip(texts(count, seed), texts(count, seed + 1), strict=True))
            ]
            if split in tests:
                rows = [{**row, "label": -1} for row in rows]
            write_rows(folder / task.name / f"{split}.jsonl", rows)
    return folder


def texts(count: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(3, 9))) for _ in range(count)]


def row_of(task: Task, number: int, first: str, second: str) -> dict:
    fields = dict.fromkeys(task.fields, second) | {task.fields[0]: first}
    if task.name == "copa":
        fields["question"] = "cause" if number % 2 else "effect"
    label = round(number % 11 / 2, 1) if task.regression else number % task.num_labels
    return {**fields, "label": label, "idx": number}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
