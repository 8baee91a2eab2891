"""The classifier, as the flags of the examples name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultipleChoice, AutoModelForSequenceClassification, PreTrainedModel

from ..checkpoints.fresh_heads import remember_fresh
from ..tasks.model import ModelArguments as TaskModelArguments
from ..tasks.model import loading
from .tasks import Task


@dataclass
class ModelArguments(TaskModelArguments):
    """Which model, and from where."""

    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Start a head of another size afresh instead of failing."}
    )


def load_model(arguments: ModelArguments, task: Task) -> PreTrainedModel:
    """The model with a head for the task; its classes are named in its config."""
    options = arguments.download_options()
    name = arguments.config_name or arguments.model_name_or_path
    with loading("model", name):
        config = AutoConfig.from_pretrained(name, **options)
    return _build(
        task,
        arguments.model_name_or_path,
        config,
        ignore_mismatched_sizes=arguments.ignore_mismatched_sizes,
        dtype=arguments.dtype,
        **options,
    )


def load_stock(
    path: str, task: Task, device: torch.device | str = "cpu", *, dtype: str = "float32"
) -> PreTrainedModel:
    """A teacher for the task; see `load_model`."""
    with loading("teacher", path):
        config = AutoConfig.from_pretrained(path)
    built: Any = _build(task, path, config, dtype=dtype)
    return built.to(device)


def _build(task: Task, path: str, config: Any, **options: Any) -> PreTrainedModel:
    build: Any = AutoModelForMultipleChoice if task.multiple_choice else AutoModelForSequenceClassification
    if not task.multiple_choice:
        _describe_labels(config, task)
    with loading("model", path):
        model, info = build.from_pretrained(path, config=config, output_loading_info=True, **options)
    remember_fresh(model, info)
    return model


def _describe_labels(config: Any, task: Task) -> None:
    config.num_labels = task.num_labels
    if task.regression:
        config.problem_type = "regression"
    else:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: number for number, label in enumerate(task.labels)}
        config.problem_type = "single_label_classification"
