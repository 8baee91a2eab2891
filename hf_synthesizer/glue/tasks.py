"""The tasks of GLUE and SuperGLUE that classify or rate a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DataError, did_you_mean

GLUE = "nyu-mll/glue"
SUPER_GLUE = "aps/super_glue"
MULTIPLE_CHOICE = "multiple_choice"


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as on the command line.
        config: as in the data set and in `evaluate.load("glue" or "super_glue", config)`.
        dataset: the data set of the Hub.
        fields: the columns of the text and of its pair; empty for a custom file whose columns are not known yet.
        labels: the classes by their ids; empty for a regression.
        metrics: the official metrics; their mean is the score.
        validation: the validation splits.
        multiple_choice: whether a row asks which of two continuations fits (COPA).
    """

    name: str
    config: str
    dataset: str
    fields: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    validation: tuple[str, ...] = ("validation",)
    multiple_choice: bool = False

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


_ENTAILMENT = ("entailment", "not_entailment")
_F1 = ("accuracy", "f1")

TASKS = {
    task.name: task
    for task in (
        Task("cola", "cola", GLUE, ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
        Task("sst2", "sst2", GLUE, ("sentence",), ("negative", "positive")),
        Task("mrpc", "mrpc", GLUE, ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), _F1),
        Task("qqp", "qqp", GLUE, ("question1", "question2"), ("not_duplicate", "duplicate"), _F1),
        Task("stsb", "stsb", GLUE, ("sentence1", "sentence2"), (), ("pearson", "spearmanr")),
        Task(
            "mnli",
            "mnli",
            GLUE,
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            validation=("validation_matched", "validation_mismatched"),
        ),
        Task("qnli", "qnli", GLUE, ("question", "sentence"), _ENTAILMENT),
        Task("rte", "rte", GLUE, ("sentence1", "sentence2"), _ENTAILMENT),
        Task("wnli", "wnli", GLUE, ("sentence1", "sentence2"), ("not_entailment", "entailment")),
        Task("boolq", "boolq", SUPER_GLUE, ("question", "passage"), ("False", "True")),
        Task(
            "cb",
            "cb",
            SUPER_GLUE,
            ("premise", "hypothesis"),
            ("entailment", "contradiction", "neutral"),
            ("accuracy", "f1"),
        ),
        Task(
            "copa",
            "copa",
            SUPER_GLUE,
            ("premise", "question", "choice1", "choice2"),
            ("choice1", "choice2"),
            multiple_choice=True,
        ),
        Task("super_glue_rte", "rte", SUPER_GLUE, ("premise", "hypothesis"), _ENTAILMENT),
        Task("wic", "wic", SUPER_GLUE, ("word", "sentence1", "sentence2"), ("False", "True")),
    )
}
"""All tasks by name. SuperGLUE's RTE is `super_glue_rte`: its columns are called otherwise than those of GLUE's."""


def get_task(name: str) -> Task:
    """The task of that name, however it is spelled (`SST-2`, `sts_b`).

    Raises:
        DataError: for an unknown one.
    """
    plain = name.lower()
    for key in (plain, plain.replace("-", "").replace("_", "")):
        if key in TASKS:
            return TASKS[key]
    raise DataError(f"Unknown task {name!r}: the tasks are {', '.join(TASKS)}.{did_you_mean(plain, TASKS)}")


def texts_of(task: Task, row: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text of a row, and its pair where the task has one (not for multiple choice)."""
    values = [row[name] for name in task.fields]
    if task.name == "wic":
        word, first, second = values
        return f"{word}: {first}", second
    return values[0], values[1] if len(values) > 1 else None


def choices_of(row: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """COPA's two pairs: the premise with its question, and each of the two answers."""
    question = "What was the cause of this?" if row["question"] == "cause" else "What happened as a result?"
    premise = f"{row['premise']} {question}"
    return (premise, row["choice1"]), (premise, row["choice2"])
