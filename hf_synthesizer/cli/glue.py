"""`evaluate` and `finetune`: models on GLUE, SuperGLUE and files of the same form, with Trainer."""

from __future__ import annotations

import copy
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError
from .console import CommandError, redirect_output, require_folder, show, shows_progress
from .options import BatchSize, Json, Model, Output

TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        "--task-name",
        help="A task of GLUE or SuperGLUE, such as mrpc or boolq. Not needed for files of yours.",
    ),
]
GlueDir = Annotated[
    Path | None,
    typer.Option(
        help="A folder with TASK/train.jsonl and TASK/validation.jsonl, instead of the Hub.", file_okay=False
    ),
]
ValidationFile = Annotated[
    Path | None,
    typer.Option(help="A csv, json, jsonl or parquet file of yours, with one or two text columns and a column label."),
]
MaxLength = Annotated[int, typer.Option(min=1, help="The maximum number of tokens in a sequence.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Use only so many validation rows.")]


def evaluate(
    model: Model,
    task: TaskName = None,
    glue_dir: GlueDir = None,
    validation_file: ValidationFile = None,
    max_length: MaxLength = 128,
    max_samples: Samples = None,
    batch_size: BatchSize = 64,
    json: Json = False,
) -> None:
    """Score a fine-tuned model on the validation rows of a task.

    \b
    Example:
      hf-synthesizer evaluate tuned --task mrpc --json
    """
    data = (task, {"validation": validation_file}, glue_dir, {"validation": max_samples})
    with redirect_output(), tempfile.TemporaryDirectory() as folder:
        training = {"output_dir": folder, "do_eval": True, "per_device_eval_batch_size": batch_size}
        results = _run(model, data, max_length, training, {})
    metrics = {name: value for name, value in results.items() if name not in ("epoch", "eval_model_preparation_time")}
    show(metrics, _table(metrics), json)


def finetune(
    model: Model,
    output: Output,
    task: TaskName = None,
    glue_dir: GlueDir = None,
    train_file: Annotated[Path | None, typer.Option(help="A file of yours to train on.")] = None,
    validation_file: ValidationFile = None,
    variant: Annotated[
        str | None, typer.Option(help="Convert a stock MODEL first: a variant or a mixture such as dense+salience.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Which layers: 0-3,5, or 'suggest' to measure them.")] = None,
    transfer_steps: Annotated[
        int, typer.Option(min=0, help="Training steps in which the new attention learns from stock attention.")
    ] = 0,
    teacher: Annotated[
        str | None, typer.Option(help="A fine-tuned stock model to learn from. Default: the stock MODEL.")
    ] = None,
    epochs: Annotated[float, typer.Option(min=0, help="The number of passes over the training rows.")] = 3.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 5e-5,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    max_train_samples: Annotated[int | None, typer.Option(min=1, help="Use only so many training rows.")] = None,
    max_samples: Samples = None,
    seed: Annotated[int, typer.Option(help="The seed for new weights and the order of rows.")] = 42,
    json: Json = False,
) -> None:
    """Fine-tune a model on a task, score it and save it. With --variant, convert it first.

    \b
    Examples:
      hf-synthesizer finetune taught --task sst2 --output tuned
      hf-synthesizer finetune bert-base-uncased --variant dense+salience --transfer-steps 900 --task mrpc --output tuned
    """
    files = {"train": train_file, "validation": validation_file}
    data = (task, files, glue_dir, {"train": max_train_samples, "validation": max_samples})
    conversion = {"variant": variant, "layers": layers, "transfer_steps": transfer_steps, "teacher": teacher}
    training = {
        "output_dir": str(output),
        "do_train": True,
        "do_eval": True,
        "num_train_epochs": epochs,
        "learning_rate": learning_rate,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": 64,
        "seed": seed,
        "logging_steps": 0.05,  # twenty points of a curve
    }
    for name, value in conversion.items():
        if value and variant is None:
            raise CommandError(f"--{name.replace('_', '-')} is an option of the conversion, so it needs --variant.")
    with redirect_output():
        require_folder(output)
        metrics = _run(model, data, max_length, training, conversion if variant else {})
    show({**metrics, "output": str(output)}, f"{_table(metrics)}\nsaved in {output}", json)


def _run(
    model: str, data: tuple[Any, ...], max_length: int, training: dict[str, Any], conversion: dict[str, Any]
) -> dict[str, float]:
    """Train or evaluate, after the conversion if there is one. Returns the metrics."""
    from transformers import TrainingArguments

    from ..glue.data import load_task
    from ..glue.run import run

    try:
        arguments = TrainingArguments(report_to="none", disable_tqdm=not shows_progress(), **training)
        task, rows = load_task(*data)
        convert = partial(_convert, arguments, task, max_length, conversion) if conversion else None
        variant = conversion.get("variant")
        return run(model, task, rows, arguments, max_length=max_length, variant=variant, convert=convert)
    except DataError as error:  # the message names flags of the examples
        flags = re.sub(r"--\w+", lambda flag: flag[0].replace("_", "-"), str(error)).replace("--task-name", "--task")
        raise CommandError(flags) from error
    except OSError as error:
        raise CommandError(f"{model!r} or its data cannot be read: {' '.join(str(error).split())[:400]}") from error


def _convert(
    training: Any, task: Any, max_length: int, conversion: dict[str, Any], model: Any, rows: Any, tokenizer: Any
) -> None:
    """Patch a model in place, transfer stock attention on varied training rows, and log both reports."""
    import torch
    from torch.utils.data import DataLoader
    from transformers.utils import logging

    from ..glue.data import collator_for
    from ..glue.run import load_model
    from ..layers.patch_report import patch_report
    from ..patching.layer_text import parse_layers
    from ..patching.swap import patch_model
    from ..transfer import suggest_layers, transfer_attention
    from ..transfer.variation import MEASURED_BATCHES, rows_for_transfer, special_ids

    logger = logging.get_logger(__name__)
    variant, layers, transfer_steps, teacher = conversion.values()
    stock = copy.deepcopy(model) if teacher is None else load_model(teacher, task, what="teacher").to(model.device)
    size = 32 * max(transfer_steps, MEASURED_BATCHES)
    texts = rows_for_transfer(rows, size, special_ids(tokenizer), max_length, training.seed)
    collate, order = collator_for(task, tokenizer, max_length), torch.Generator().manual_seed(training.seed)
    batches: Any = DataLoader(texts, 32, shuffle=True, generator=order, collate_fn=collate)  # type: ignore[arg-type]
    new_attention = variant
    if layers == "suggest":
        new_attention, layers = suggest_layers(stock, batches, variant, 0.5, max_length=max_length), None
        logger.warning(f"Suggested layers:\n{new_attention}")
    patch_model(model, new_attention, layers=parse_layers(layers), max_length=max_length)
    logger.warning(f"{patch_report(model)}")
    if transfer_steps:
        checkpoint_dir = Path(str(training.output_dir)) / "transfer"
        report = transfer_attention(model, stock, batches, steps=transfer_steps, checkpoint_dir=checkpoint_dir)
        logger.warning(f"Transfer:\n{report}")


def _table(metrics: dict[str, float]) -> str:
    texts = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in metrics.items()}
    return "\n".join(f"{name:32}{text}" for name, text in texts.items())


COMMANDS = (evaluate, finetune)
