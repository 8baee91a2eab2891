"""The tasks of GLUE and SuperGLUE that classify or rate a text or a pair of texts, and their official metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ..errors import DataError, did_you_mean

GLUE = "nyu-mll/glue"
SUPER_GLUE = "aps/super_glue"


@dataclass(frozen=True)
class Task:
    """One task: the source of its rows, their columns, and the labels and metrics."""

    name: str
    config: str  # in the dataset, and in `evaluate.load("glue" or "super_glue", config)`
    dataset: str  # on the Hub
    fields: tuple[str, ...]  # the columns with the text and its pair
    labels: tuple[str, ...]  # the classes by their ids; empty for a regression
    metrics: tuple[str, ...] = ("accuracy",)
    validation: tuple[str, ...] = ("validation",)
    multiple_choice: bool = False  # whether a row asks for one of two continuations (COPA)

    @property
    def regression(self) -> bool:
        """Whether labels are numbers and not classes."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """How many outputs a model needs."""
        return max(1, len(self.labels))

    def score(self, metrics: Mapping[str, Any]) -> float:
        """The official main metric: the mean of the task's metrics, as on the GLUE leaderboard."""
        return float(sum(metrics[name] for name in self.metrics) / len(self.metrics))


_ENTAILMENT, _BOTH = ("entailment", "not_entailment"), ("validation_matched", "validation_mismatched")
_SENTENCES, _PREMISE = ("sentence1", "sentence2"), ("premise", "hypothesis")
_CHOICES, _F1 = ("choice1", "choice2"), ("accuracy", "f1")

TASKS = {
    task.name: task
    for task in (
        Task("cola", "cola", GLUE, ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
        Task("sst2", "sst2", GLUE, ("sentence",), ("negative", "positive")),
        Task("mrpc", "mrpc", GLUE, _SENTENCES, ("not_equivalent", "equivalent"), _F1),
        Task("qqp", "qqp", GLUE, ("question1", "question2"), ("not_duplicate", "duplicate"), _F1),
        Task("stsb", "stsb", GLUE, _SENTENCES, (), ("pearson", "spearmanr")),
        Task("mnli", "mnli", GLUE, _PREMISE, ("entailment", "neutral", "contradiction"), validation=_BOTH),
        Task("qnli", "qnli", GLUE, ("question", "sentence"), _ENTAILMENT),
        Task("rte", "rte", GLUE, _SENTENCES, _ENTAILMENT),
        Task("wnli", "wnli", GLUE, _SENTENCES, ("not_entailment", "entailment")),
        Task("boolq", "boolq", SUPER_GLUE, ("question", "passage"), ("False", "True")),
        Task("cb", "cb", SUPER_GLUE, _PREMISE, ("entailment", "contradiction", "neutral"), _F1),
        Task("copa", "copa", SUPER_GLUE, ("premise", "question", *_CHOICES), _CHOICES, multiple_choice=True),
        Task("super_glue_rte", "rte", SUPER_GLUE, _PREMISE, _ENTAILMENT),
        Task("wic", "wic", SUPER_GLUE, ("word", *_SENTENCES), ("False", "True")),
    )
}
"""All tasks by name. SuperGLUE's RTE is `super_glue_rte`, because its columns have other names than those of GLUE's RTE."""


def get_task(name: str) -> Task:
    """Find a task by name. Upper case, hyphens and underscores are ignored (`SST-2`, `sts_b`). `DataError` for unknown names."""
    plain = name.lower()
    task = TASKS.get(plain) or TASKS.get(plain.replace("-", "").replace("_", ""))
    if task is None:
        raise DataError(f"Unknown task {name!r}: the tasks are {', '.join(TASKS)}.{did_you_mean(plain, TASKS)}")
    return task


_METRICS = {
    "accuracy": lambda task, predictions, labels: accuracy_score(labels, predictions),
    "f1": lambda task, predictions, labels: f1_score(
        labels, predictions, average="macro" if task.num_labels > 2 else "binary"
    ),
    "matthews_correlation": lambda task, predictions, labels: matthews_corrcoef(labels, predictions),
    "pearson": lambda task, predictions, labels: pearsonr(predictions, labels)[0],
    "spearmanr": lambda task, predictions, labels: spearmanr(predictions, labels)[0],
}


def predictions_of(task: Task, outputs: np.ndarray | tuple[np.ndarray, ...]) -> np.ndarray:
    """Class ids or regression scores from a model's outputs (rows, labels), or from a tuple that starts with them."""
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return outputs.reshape(len(outputs), -1)[:, 0] if task.regression else outputs.argmax(-1)


def official_metrics(task: Task, predictions: np.ndarray, references: Any) -> dict[str, float]:
    """Compute the task's metrics with scikit-learn and SciPy, without a network."""
    return {name: float(_METRICS[name](task, predictions, references)) for name in task.metrics}
