#!/usr/bin/env python
"""Convert a pretrained model to Synthesizer attention and fine-tune it on GLUE or SuperGLUE, with Trainer.

    python examples/run_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --variant dense+salience \\
        --transfer_steps 900 --do_train --do_eval --output_dir outputs/mrpc
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict
from torch.utils.data import DataLoader
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_synthesizer import SynthesizerError
from hf_synthesizer.glue.conversion import ConversionArguments, convert, load_student_and_teacher, transfer_text
from hf_synthesizer.glue.data import DataArguments, collator, load_data, tokenize
from hf_synthesizer.glue.metrics import load_metric, predictions_of
from hf_synthesizer.glue.model import ModelArguments, load_tokenizer
from hf_synthesizer.glue.tasks import DataError, Task


@dataclass
class GlueTrainingArguments(TrainingArguments):
    """Trainer's own, with the defaults of fine-tuning on GLUE."""

    output_dir: str | None = field(default="outputs/glue", metadata={"help": "Where the model and its scores go."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a training step and device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step and device."})


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    parser = HfArgumentParser((ModelArguments, DataArguments, ConversionArguments, GlueTrainingArguments))
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].endswith(".json"):
        parsed = parser.parse_json_file(json_file=os.path.abspath(argv[0]))
    else:
        parsed = parser.parse_args_into_dataclasses(argv)
    model_arguments, data_arguments, conversion, training = parsed
    set_seed(training.seed)

    task, rows = load_data(data_arguments)
    _require_splits(rows, training, task)
    tokenizer = load_tokenizer(model_arguments)
    encoded = {split: tokenize(task, data, tokenizer, data_arguments) for split, data in rows.items()}
    collate = collator(task, tokenizer, data_arguments)
    model, teacher = load_student_and_teacher(model_arguments, conversion, task, training.device)

    text = transfer_text(
        encoded.get("train", next(iter(encoded.values()))),
        conversion,
        data_arguments,
        tokenizer,
        training.seed,
    )
    with training.main_process_first(desc="transfer"):  # the other processes load what the first one made
        convert(
            model,
            conversion,
            max_length=data_arguments.max_length,
            dataloader=DataLoader(
                text,
                batch_size=conversion.transfer_batch_size,
                shuffle=True,
                generator=torch.Generator().manual_seed(training.seed),
                collate_fn=collate,
            ),
            teacher=teacher,
            autocast=torch.bfloat16 if training.bf16 else None,
            checkpoint_dir=Path(training.output_dir) / "transfer",
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
        checkpoint = training.resume_from_checkpoint
        if checkpoint is None and os.path.isdir(training.output_dir):
            checkpoint = get_last_checkpoint(training.output_dir)
        found = trainer.train(resume_from_checkpoint=checkpoint).metrics
        found["train_samples"] = len(encoded["train"])
        trainer.save_model()
        trainer.log_metrics("train", found)
        trainer.save_metrics("train", found)
        trainer.save_state()
        metrics |= found
    if training.do_eval:
        for split in task.validation:
            suffix = split.removeprefix("validation")  # MNLI has two validation sets
            found = trainer.evaluate(encoded[split], metric_key_prefix=f"eval{suffix}")
            found[f"eval{suffix}_samples"] = len(encoded[split])
            trainer.log_metrics(f"eval{suffix}", found)
            trainer.save_metrics(f"eval{suffix}", found)
            metrics |= found
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


if __name__ == "__main__":
    try:
        main()
    except SynthesizerError as error:
        raise SystemExit(f"error: {error}") from None
