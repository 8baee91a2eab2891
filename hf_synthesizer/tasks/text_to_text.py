"""Text to text, for translation and summarisation: pairs, a conversion, a training with Seq2SeqTrainer, generated text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from ..errors import DataError, InvalidConfigError
from .conversion import ConversionArguments, require_weights
from .files import FileArguments, require_splits
from .languages import speak
from .model import TextModelArguments, load_teacher, load_text_model, load_tokenizer, require_positions
from .perplexity import IGNORED
from .training import convert_before_training, evaluate, keep, train, transfer_batches, write_lines

Scores = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""From generated and wanted texts to metrics."""


@dataclass
class TextToTextArguments(FileArguments):
    """Which pairs, and how long."""

    source_prefix: str = field(
        default="", metadata={"help": "What stands before each source, such as 'summarize: ' for T5."}
    )
    max_source_length: int = field(default=128, metadata={"help": "How many tokens a source has at most."})
    max_target_length: int = field(default=128, metadata={"help": "How many tokens a target has at most."})
    max_length: int | None = field(
        default=None,
        metadata={"help": "The number of positions of the synthesizers; the longest of all lengths by default."},
    )


@dataclass
class TextToTextTrainingArguments(Seq2SeqTrainingArguments):
    """Seq2SeqTrainer's own; text is generated wherever the model is evaluated."""

    output_dir: str | None = field(default="outputs/text", metadata={"help": "Where the model and its scores go."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Generate text and score it."})
    generation_max_length: int | None = field(
        default=None,
        metadata={
            "help": "How many tokens are generated at most; --max_target_length by default.",
            "aliases": ["--val_max_target_length"],
        },
    )
    generation_num_beams: int | None = field(
        default=None, metadata={"help": "How many beams text is searched with.", "aliases": ["--num_beams"]}
    )


class TextToTextTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that scores what is generated against the texts as they are, and not as a tokenizer gives them back."""

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


def run(
    model_arguments: TextModelArguments,
    data: TextToTextArguments,
    conversion: ConversionArguments,
    training: TextToTextTrainingArguments,
    pairs: dict[str, Dataset],
    scores: Scores,
    languages: tuple[str, str] | None = None,
) -> dict[str, float]:
    """Convert, train, evaluate and predict on pairs of texts, as far as the arguments say so; returns the metrics.

    Args:
        model_arguments, data, conversion, training: what the command line says.
        pairs: the splits, with the columns `source` and `target`.
        scores: the metrics of generated text.
        languages: what is translated into what.

    Raises:
        DataError: for data that is missing or does not fit.
        InvalidConfigError: for arguments that contradict each other, and what `patch_model` and `transfer_attention` raise.
    """
    require_weights(model_arguments.model_name_or_path, conversion)
    require_splits(pairs, training)
    training.generation_max_length = training.generation_max_length or data.max_target_length
    wanted = max(data.max_source_length, data.max_target_length, training.generation_max_length)
    length = data.max_length or wanted
    if length < wanted:
        raise InvalidConfigError(
            f"--max_length {length} is less than the longest text, source, target or generated: {wanted}."
        )
    set_seed(training.seed)
    tokenizer = load_tokenizer(model_arguments)
    tokenizer.padding_side = "right"
    model = load_text_model(model_arguments, AutoModelForSeq2SeqLM, tokenizer).to(training.device)
    require_positions(model, wanted, "A length of")
    speak(model, tokenizer, languages, data.source_prefix)
    encoded = {split: encode(rows, tokenizer, data) for split, rows in pairs.items()}
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    convert_before_training(
        model,
        conversion,
        training,
        max_length=length,
        dataloader=transfer_batches(
            lambda: encoded.get("train", encoded[next(iter(encoded))]).remove_columns("target"),
            conversion,
            collate,
            training.seed,
        ),
        teacher=load_teacher(conversion.teacher, AutoModelForSeq2SeqLM, training.device, model_arguments),
    )
    trainer = TextToTextTrainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train") if training.do_train else None,
        eval_dataset=encoded.get("validation"),
        processing_class=tokenizer,
        data_collator=collate,
        scores=scores,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer)
    if training.do_eval:
        metrics |= evaluate(trainer, encoded["validation"])
    if training.do_predict:
        found = dict(trainer.predict(encoded["test"], metric_key_prefix="predict").metrics or {})
        keep(trainer, "predict", found)
        if training.predict_with_generate:
            write_lines(trainer, "generated_predictions.txt", trainer.generated)
        metrics |= found
    if training.push_to_hub:
        task = "translation" if languages else "summarization"
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks=task)
    return metrics


def checked(split: str, sources: Sequence[Any], targets: Sequence[Any]) -> Dataset:
    """Pairs of texts, each of which says something.

    Raises:
        DataError: where one does not.
    """
    for side, texts in (("source", sources), ("target", targets)):
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"Row {number} of the {split} data has no {side} text: found {text!r}.")
    if not len(sources):
        raise DataError(f"The {split} data has no rows.")
    return Dataset.from_dict({"source": list(sources), "target": list(targets)})


def encode(rows: Dataset, tokenizer: PreTrainedTokenizerBase, data: TextToTextArguments) -> Dataset:
    """Rows of the model's inputs with `labels`, and the wanted text as `target`."""
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
