"""Translation and summarisation: flags, tokenized pairs, and a Seq2SeqTrainer that scores generated text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_synthesizer.checkpoints.resuming import keep
from hf_synthesizer.errors import DataError, InvalidConfigError

from .files import FileArguments
from .perplexity import IGNORED
from .training import write_lines

Scores = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""From generated and wanted texts to metrics."""


@dataclass
class TextToTextArguments(FileArguments):
    """The flags of the pairs, and the lengths."""

    source_prefix: str = field(
        default="", metadata={"help": "The text before each source, such as 'summarize: ' for T5."}
    )
    max_source_length: int = field(default=128, metadata={"help": "The maximum number of tokens of a source."})
    max_target_length: int = field(default=128, metadata={"help": "The maximum number of tokens of a target."})
    max_length: int | None = field(
        default=None,
        metadata={"help": "The number of positions of the synthesizers; the longest of all lengths by default."},
    )


@dataclass
class TextToTextTrainingArguments(Seq2SeqTrainingArguments):
    """The flags of Seq2SeqTrainer. Each evaluation generates text."""

    output_dir: str | None = field(
        default="outputs/text", metadata={"help": "The folder for the model and its scores."}
    )
    predict_with_generate: bool = field(default=True, metadata={"help": "Generate text and score it."})
    generation_max_length: int | None = field(
        default=None,
        metadata={
            "help": "The maximum number of generated tokens. Default: --max_target_length.",
            "aliases": ["--val_max_target_length"],
        },
    )
    generation_num_beams: int | None = field(
        default=None, metadata={"help": "The number of beams for generation.", "aliases": ["--num_beams"]}
    )


class TextToTextTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that compares generated text with the original text of the data, not with decoded tokens."""

    def __init__(self, *, scores: Scores, **kwargs: Any):
        super().__init__(**kwargs)
        generates = getattr(self.args, "predict_with_generate", False)
        self.compute_metrics = self._score if generates else None
        self.scores = scores
        self.targets: list[str] = []
        self.generated: list[str] = []

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        self.targets = list(rows["target"])
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self.targets = list(test_dataset["target"])
        return super().predict(test_dataset, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self.accelerator.gather_for_metrics  # without the rows that fill up a last batch
        return super().evaluation_loop(*args, **kwargs)

    def _score(self, evaluation: EvalPrediction) -> dict[str, float]:
        found = evaluation.predictions[0] if isinstance(evaluation.predictions, tuple) else evaluation.predictions
        tokenizer: Any = self.processing_class
        tokens = np.where(found == IGNORED, tokenizer.pad_token_id, found)
        self.generated = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        lengths = (tokens != tokenizer.pad_token_id).sum(1)
        return {**self.scores(self.generated, self.targets), "gen_len": float(lengths.mean())}


def longest(data: TextToTextArguments, training: TextToTextTrainingArguments) -> tuple[int, int]:
    """The maximum length of sources, targets and generated texts, and the number of positions of the synthesizers.

    Raises:
        InvalidConfigError: for fewer positions than the longest text needs.
    """
    training.generation_max_length = training.generation_max_length or data.max_target_length
    wanted = max(data.max_source_length, data.max_target_length, training.generation_max_length)
    length = data.max_length or wanted
    if length < wanted:
        raise InvalidConfigError(
            f"--max_length {length} is less than the longest text, source, target or generated: {wanted}."
        )
    return wanted, length


def predict(trainer: TextToTextTrainer, rows: Dataset) -> dict[str, float]:
    """Print and save the metrics of a test set, and write the generated texts, one on each line."""
    found = dict(trainer.predict(rows, metric_key_prefix="predict").metrics or {})
    keep(trainer, "predict", found)
    if trainer.args.predict_with_generate:
        write_lines(trainer, "generated_predictions.txt", trainer.generated)
    return found


def checked(split: str, sources: Sequence[Any], targets: Sequence[Any]) -> Dataset:
    """Check that no text of the pairs is empty.

    Raises:
        DataError: for an empty text.
    """
    for side, texts in (("source", sources), ("target", targets)):
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"Row {number} of the {split} data has no {side} text: found {text!r}.")
    if not len(sources):
        raise DataError(f"The {split} data has no rows.")
    return Dataset.from_dict({"source": list(sources), "target": list(targets)})


def encode(rows: Dataset, tokenizer: PreTrainedTokenizerBase, data: TextToTextArguments) -> Dataset:
    """Rows of the model's inputs with `labels`, and the original target text as `target`."""
    make = partial(_encode, tokenizer=tokenizer, data=data)
    workers = data.preprocessing_num_workers
    return rows.map(
        make, batched=True, remove_columns=["source"], desc="tokenize", load_from_cache_file=False, num_proc=workers
    )


def _encode(
    rows: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, data: TextToTextArguments
) -> dict[str, list[Any]]:
    sources = [data.source_prefix + text for text in rows["source"]]
    encoded = dict(tokenizer(sources, max_length=data.max_source_length, truncation=True))
    targets = tokenizer(text_target=rows["target"], max_length=data.max_target_length, truncation=True)
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "labels": targets["input_ids"],
        "target": rows["target"],
    }
