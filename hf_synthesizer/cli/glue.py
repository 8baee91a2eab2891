"""`evaluate` and `finetune`: GLUE, SuperGLUE and files of the same kind, with Trainer."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError
from .console import CommandError, Json, require_folder, watched, working
from .console import report as show
from .models import Model
from .patching import Output

TaskName = Annotated[
    str | None,
    typer.Option(
        "--task", "--task-name", help="A task of GLUE or SuperGLUE, such as mrpc or boolq; not needed for own files."
    ),
]
GlueDir = Annotated[
    Path | None, typer.Option(help="A folder with TASK/train.jsonl and so on, instead of the Hub.", file_okay=False)
]
ValidationFile = Annotated[
    Path | None, typer.Option(help="A csv, json, jsonl or parquet file of yours: a text column or two, and label.")
]
MaxLength = Annotated[int, typer.Option(min=1, help="How many tokens a sequence has at most.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Use that many validation rows.")]


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    for command in (evaluate, finetune):
        app.command()(command)


def evaluate(
    model: Model,
    task: TaskName = None,
    glue_dir: GlueDir = None,
    validation_file: ValidationFile = None,
    max_length: MaxLength = 128,
    max_samples: Samples = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 64,
    json: Json = False,
) -> None:
    """Score a fine-tuned model on the validation rows of a task.

    \b
    Example:
      hf-synthesizer evaluate tuned --task mrpc --json
    """
    data = {"task_name": task, "max_length": max_length, "max_eval_samples": max_samples}
    files = {"glue_dir": glue_dir, "validation_file": validation_file}
    with working(), tempfile.TemporaryDirectory() as folder:
        training = {"output_dir": folder, "do_eval": True, "per_device_eval_batch_size": batch_size}
        found = _run(model, data, files, {}, training)
    metrics = {name: value for name, value in found.items() if name not in ("epoch", "eval_model_preparation_time")}
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
        int, typer.Option(min=0, help="Steps in which stock attention teaches the new one.")
    ] = 0,
    teacher: Annotated[str | None, typer.Option(help="A fine-tuned stock model that teaches.")] = None,
    epochs: Annotated[float, typer.Option(min=0, help="How often the training rows are walked over.")] = 3.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Its highest value.")] = 5e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    max_length: MaxLength = 128,
    max_train_samples: Annotated[int | None, typer.Option(min=1, help="Use that many training rows.")] = None,
    max_samples: Samples = None,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 42,
    json: Json = False,
) -> None:
    """Fine-tune a model on a task, convert it before if asked to, score it and save it.

    \b
    Examples:
      hf-synthesizer finetune taught --task sst2 --output tuned
      hf-synthesizer finetune bert-base-uncased --variant dense+salience --transfer-steps 900 --task mrpc --output tuned
    """
    data = {
        "task_name": task,
        "max_length": max_length,
        "max_train_samples": max_train_samples,
        "max_eval_samples": max_samples,
    }
    files = {"glue_dir": glue_dir, "train_file": train_file, "validation_file": validation_file}
    conversion = {"variant": variant, "layers": layers, "transfer_steps": transfer_steps, "teacher": teacher}
    training = {
        "output_dir": str(output),
        "do_train": True,
        "do_eval": True,
        "num_train_epochs": epochs,
        "learning_rate": learning_rate,
        "per_device_train_batch_size": batch_size,
        "seed": seed,
        "logging_steps": 0.05,  # twenty points of a curve
    }
    with working():
        require_folder(output)
        metrics = _run(model, data, files, conversion, training)
    show({**metrics, "output": str(output)}, f"{_table(metrics)}\nsaved in {output}", json)


def _run(
    model: str,
    data: dict[str, Any],
    files: dict[str, Path | None],
    conversion: dict[str, Any],
    training: dict[str, Any],
) -> dict[str, float]:
    from ..glue.conversion import ConversionArguments
    from ..glue.data import DataArguments
    from ..glue.model import ModelArguments
    from ..glue.run import GlueTrainingArguments, run

    named: dict[str, Any] = {name: None if path is None else str(path) for name, path in files.items()}
    try:
        return run(
            ModelArguments(model),
            DataArguments(**data, **named, local_metrics=True),
            ConversionArguments(**conversion),
            GlueTrainingArguments(report_to="none", disable_tqdm=not watched(), **training),
        )
    except DataError as error:  # in the flags of the examples
        flags = re.sub(r"--\w+", lambda flag: flag[0].replace("_", "-"), str(error)).replace("--task-name", "--task")
        raise CommandError(flags) from error
    except OSError as error:
        raise CommandError(f"{model!r} or its data cannot be read: {' '.join(str(error).split())[:400]}") from error


def _table(metrics: dict[str, float]) -> str:
    return "\n".join(
        f"{name:32}{value:.4f}" if isinstance(value, float) else f"{name:32}{value}" for name, value in metrics.items()
    )
