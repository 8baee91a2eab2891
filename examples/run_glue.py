#!/usr/bin/env python
"""Convert a pretrained model to Synthesizer attention and fine-tune it on GLUE or SuperGLUE, with Trainer.

    python examples/run_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --variant dense+salience \\
        --transfer_steps 900 --do_train --do_eval --output_dir outputs/mrpc

Three places in `main` are ours: `patch_model`, `transfer_attention`, and the saved config.json.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from hf_synthesizer import patch_model, patch_report, transfer_attention
from hf_synthesizer.checkpoints.resuming import train_from
from hf_synthesizer.errors import DataError
from hf_synthesizer.glue.tasks import Task, predictions_of
from shared import glue
from shared.command_line import parse, run_script
from shared.model import load_tokenizer
from shared.training import checkpoint_to_go_on_from, evaluate

logger = logging.get_logger(__name__)


@dataclass
class GlueTrainingArguments(TrainingArguments):
    """The flags of Trainer, with defaults for GLUE."""

    output_dir: str = field(default="outputs/glue", metadata={"help": "The folder for the model and its scores."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a training step and device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step and device."})


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data_arguments, conversion, training = parse(
        (glue.ClassifierArguments, glue.DataArguments, glue.ClassifierConversionArguments, GlueTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    set_seed(training.seed)

    # Rows, as numbers.
    task, rows = glue.load_data(data_arguments)
    tests = [split for split in rows if split == "test" or split.startswith("test_")]
    require_splits(list(rows), tests, training, task)
    tokenizer = load_tokenizer(model_arguments)
    encoded = {split: glue.tokenize(task, rows[split], tokenizer, data_arguments) for split in rows}
    collate = glue.collator(task, tokenizer, data_arguments)

    # The model is patched, and the stock model teaches the new attention.
    model, teacher = glue.load_student_and_teacher(model_arguments, conversion, task, training.device)
    checkpoint = checkpoint_to_go_on_from(training, model, conversion.variant)
    if conversion.variant is not None:
        stock = copy.deepcopy(model) if teacher is None else teacher
        autocast = torch.bfloat16 if training.bf16 else None
        some_rows = encoded.get("train", next(iter(encoded.values())))
        text = glue.transfer_text(some_rows, conversion, data_arguments, tokenizer, training.seed)
        batches = conversion.batches(text, collate, training.seed)
        with training.main_process_first(desc="transfer"):  # the other processes load the result of the first
            variant, layers = conversion.choose(stock, batches, data_arguments.max_length, autocast)
            patch_model(model, variant, layers=layers, max_length=data_arguments.max_length, **conversion.options)
            logger.warning(f"{patch_report(model)}")
            if conversion.transfers:
                report = transfer_attention(
                    model,
                    stock,
                    batches,
                    method=conversion.transfer_method,
                    steps=conversion.stages,
                    autocast=autocast,
                    checkpoint_dir=Path(training.output_dir) / "transfer",
                )
                logger.warning(f"Transfer:\n{report}")
        del stock, teacher  # to free their memory for the training

    # From here on everything is as without hf_synthesizer.
    metric = glue.load_metric(task, network=not data_arguments.local_metrics)

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        predictions = predictions_of(task, evaluation.predictions)
        computed = metric.compute(predictions=predictions, references=evaluation.label_ids)
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
        metrics |= train_from(trainer, checkpoint)
        # The config.json says what was swapped. AutoModel loads the model after `import hf_synthesizer`.
        trainer.save_model()
    if training.do_eval:
        for split in task.validation:
            suffix = split.removeprefix("validation")  # MNLI has two validation sets
            metrics |= evaluate(trainer, encoded[split], f"eval{suffix}")
    if training.do_predict:
        for split in tests:
            outputs = trainer.predict(encoded[split].remove_columns("labels"), metric_key_prefix="predict").predictions
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


def require_splits(splits: list[str], tests: list[str], training: TrainingArguments, task: Task) -> None:
    """Check that there is data for each of --do_train, --do_eval and --do_predict.

    Raises:
        DataError: if data is missing.
    """
    if training.do_train and "train" not in splits:
        raise DataError("--do_train needs training data: name --train_file.")
    missing = [split for split in task.validation if split not in splits]
    if training.do_eval and missing:
        raise DataError(f"--do_eval needs the {missing[0]} data: name --validation_file.")
    if training.do_predict and not tests:
        raise DataError("--do_predict needs test data: name --test_file.")


def write_predictions(path: Path, task: Task, outputs: np.ndarray | tuple[np.ndarray, ...]) -> None:
    """Write the predictions in the format of GLUE's server: the index of each row, and its class or score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write("index\tprediction\n")
        for number, value in enumerate(predictions_of(task, outputs)):
            file.write(f"{number}\t{value:.3f}\n" if task.regression else f"{number}\t{task.labels[value]}\n")


if __name__ == "__main__":
    run_script(main)
