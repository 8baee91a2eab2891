"""The official metrics of GLUE and SuperGLUE: `evaluate`'s own with a network, equal ones of ours without."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from evaluate.utils.logging import get_logger
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers.utils import logging

from .tasks import SUPER_GLUE, Task

logger = logging.get_logger(__name__)
get_logger("evaluate").setLevel("ERROR")


class LocalGlueMetric(evaluate.Metric):
    """What `evaluate.load("glue", task)` computes, by scikit-learn and SciPy alone, for machines without a network."""

    def __init__(self, task: Task, **kwargs: Any):
        self.task = task
        super().__init__(config_name=task.config, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        kind = "float32" if self.task.regression else "int64"
        return evaluate.MetricInfo(
            description="The official metrics of GLUE and SuperGLUE.",
            citation="",
            inputs_description="predictions: class ids, or numbers for a regression; references: the same.",
            features=datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)}),
        )

    def _compute(self, predictions: Any, references: Any, **kwargs: Any) -> dict[str, float]:
        found, wanted = np.asarray(predictions), np.asarray(references)
        return {name: float(_METRICS[name](self.task, found, wanted)) for name in self.task.metrics}


def _f1(task: Task, found: np.ndarray, wanted: np.ndarray) -> float:
    return f1_score(wanted, found, average="macro" if task.num_labels > 2 else "binary")


_METRICS = {
    "accuracy": lambda task, found, wanted: accuracy_score(wanted, found),
    "f1": _f1,
    "matthews_correlation": lambda task, found, wanted: matthews_corrcoef(wanted, found),
    "pearson": lambda task, found, wanted: pearsonr(found, wanted)[0],
    "spearmanr": lambda task, found, wanted: spearmanr(found, wanted)[0],
}


def load_metric(task: Task, *, network: bool = True, experiment_id: str | None = None) -> evaluate.Metric:
    """The metric of a task: from the Hub with `network`, and if that cannot be had (a message says so) the local one."""
    options = {} if experiment_id is None else {"experiment_id": experiment_id}
    if network and task.name != "custom":
        name = "super_glue" if task.dataset == SUPER_GLUE else "glue"
        try:
            return evaluate.load(name, task.config, **options)
        except Exception as error:  # whatever the network, the Hub or the sandbox of the script did
            logger.warning(
                f"evaluate.load({name!r}, {task.config!r}) did not work ({type(error).__name__}): computing the same "
                f"metrics with scikit-learn and SciPy instead."
            )
    return LocalGlueMetric(task, **options)


def predictions_of(task: Task, outputs: np.ndarray) -> np.ndarray:
    """From a model's outputs (rows, labels): class ids, or the numbers of a regression."""
    return outputs.reshape(len(outputs), -1)[:, 0] if task.regression else outputs.argmax(-1)
