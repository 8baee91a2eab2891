"""A conversion and a fine-tuning on GLUE or SuperGLUE, with Trainer, as arguments say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import DatasetDict
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from ..errors import DataError
from ..tasks.model import load_tokenizer
from ..tasks.training import convert_before_training, evaluate, train, transfer_batches
from .conversion import ConversionArguments, load_student_and_teacher, transfer_text
from .data import DataArguments, collator, load_data, tokenize
from .metrics import load_metric, predictions_of
from .model import ModelArguments
from .tasks import Task


@dataclass
class GlueTrainingArguments(TrainingArguments):
    """Trainer's own, with the defaults of fine-tuning on GLUE."""

    output_dir: str = field(default="outputs/glue", metadata={"help": "Where the model and its scores go."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a training step and device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step and device."})


def run(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    conversion: ConversionArguments,
    training: GlueTrainingArguments,
) -> dict[str, float]:
    """Load, convert, train, evaluate and predict, as far as the arguments say so; returns the metrics.

    Raises:
        DataError: for data that is missing or does not fit.
        InvalidConfigError: for arguments that contradict each other, and what `patch_model` and `transfer_attention` raise.
    """
    set_seed(training.seed)

    task, rows = load_data(data_arguments)
    _require_splits(rows, training, task)
    tokenizer = load_tokenizer(model_arguments)
    encoded = {split: tokenize(task, data, tokenizer, data_arguments) for split, data in rows.items()}
    collate = collator(task, tokenizer, data_arguments)
    rows_for_transfer = encoded.get("train", next(iter(encoded.values())))
    model, teacher = load_student_and_teacher(model_arguments, conversion, task, training.device)

    convert_before_training(
        model,
        conversion,
        training,
        max_length=data_arguments.max_length,
        dataloader=transfer_batches(
            lambda: transfer_text(rows_for_transfer, conversion, data_arguments, tokenizer, training.seed),
            conversion,
            collate,
            training.seed,
        ),
        teacher=teacher,
    )
    del teacher  # its memory is free for the training

    metric = load_metric(task, network=not data_arguments.local_metrics)

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        outputs = evaluation.predictions[0] if isinstance(evaluation.predictions, tuple) else evaluation.predictions
        computed = metric.compute(predictions=predictions_of(task, outputs), references=evaluation.label_ids)
        return {**computed, "score": task.score(computed)}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train"),
        eval_dataset=encoded.get(task.validation[0]),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=collate,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer)
    if training.do_eval:
        for split in task.validation:
            suffix = split.removeprefix("validation")  # MNLI has two validation sets
            metrics |= evaluate(trainer, encoded[split], f"eval{suffix}")
    if training.do_predict:
        for split in _tests_of(encoded):
            outputs = trainer.predict(encoded[split].remove_columns("labels"), metric_key_prefix="predict").predictions
            outputs = outputs[0] if isinstance(outputs, tuple) else outputs
            if trainer.is_world_process_zero():
                write_predictions(Path(training.output_dir) / f"predictions_{split}.tsv", task, outputs)
    if training.push_to_hub:
        trainer.push_to_hub(
            finetuned_from=model_arguments.model_name_or_path,
            tasks="text-classification",
            language="en",
            dataset=f"{task.dataset} {task.config}",
        )
    return metrics


def _require_splits(rows: DatasetDict, training: TrainingArguments, task: Task) -> None:
    if training.do_train and "train" not in rows:
        raise DataError("--do_train needs training data: name --train_file.")
    missing = [split for split in task.validation if split not in rows]
    if training.do_eval and missing:
        raise DataError(f"--do_eval needs the {missing[0]} data: name --validation_file.")
    if training.do_predict and not _tests_of(rows):
        raise DataError("--do_predict needs test data: name --test_file.")


def _tests_of(rows: DatasetDict) -> list[str]:
    return [split for split in rows if split == "test" or split.startswith("test_")]


def write_predictions(path: Path, task: Task, outputs: np.ndarray) -> None:
    """One line a row, as GLUE's server takes them: its index, and the class or the score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write("index\tprediction\n")
        for number, value in enumerate(predictions_of(task, outputs)):
            file.write(f"{number}\t{value:.3f}\n" if task.regression else f"{number}\t{task.labels[value]}\n")
