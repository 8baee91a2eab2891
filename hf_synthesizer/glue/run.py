"""Load, convert, fine-tune and score a classifier with Trainer, for `hf-synthesizer finetune` and `evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ..checkpoints.fresh_heads import remember_fresh, require_trained_head
from ..checkpoints.resuming import keep, last_checkpoint, require_own, train_from
from ..errors import DataError, loading
from .data import collator_for, tokenize_task
from .tasks import Task, official_metrics, predictions_of


def load_model(
    path: str,
    task: Task,
    *,
    what: str = "model",
    config_name: str | None = None,
    dtype: str = "float32",
    ignore_mismatched_sizes: bool = False,
    **download: Any,
) -> Any:
    """Load a model with a head for the task, and write the task's classes to its config. Errors call the model `what`.

    Raises:
        InvalidConfigError: if it cannot be loaded.
    """
    build: Any = AutoModelForMultipleChoice if task.multiple_choice else AutoModelForSequenceClassification
    with loading(what, config_name or path):
        config: Any = AutoConfig.from_pretrained(config_name or path, **download)
    if not task.multiple_choice:
        config.num_labels = task.num_labels
        config.problem_type = "regression" if task.regression else "single_label_classification"
        if task.labels:
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {label: number for number, label in enumerate(task.labels)}
    options = {"dtype": dtype, "ignore_mismatched_sizes": ignore_mismatched_sizes, **download}
    with loading(what, path):
        model, info = build.from_pretrained(path, config=config, output_loading_info=True, **options)
    remember_fresh(model, info)
    return model


def run(
    path: str,
    task: Task,
    rows: DatasetDict,
    training: TrainingArguments,
    *,
    max_length: int,
    variant: str | None = None,
    convert: Callable[[Any, Dataset, PreTrainedTokenizerBase], Any] | None = None,
) -> dict[str, float]:
    """Load a model, convert it, train it if `training.do_train` is set, and evaluate it. Returns the metrics.

    `convert(model, tokenized training rows, tokenizer)` patches the model in place.
    """
    set_seed(training.seed)
    for split in ("train", *task.validation) if training.do_train else task.validation:
        if split not in rows:
            raise DataError(f"There is no {split} data: name --{split.partition('_')[0]}_file.")
    with loading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = {split: tokenize_task(task, rows[split], tokenizer, max_length) for split in rows}
    model = load_model(path, task).to(training.device)
    if not training.do_train:
        require_trained_head(model, "Without training, the scores judge the head that was loaded")
    checkpoint = last_checkpoint(training) if training.do_train else None
    require_own(checkpoint, model, variant)
    if convert is not None:
        convert(model, encoded["train"], tokenizer)

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        scores = official_metrics(task, predictions_of(task, evaluation.predictions), evaluation.label_ids)
        return {**scores, "score": task.score(scores)}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train"),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=collator_for(task, tokenizer, max_length),
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train_from(trainer, checkpoint)
        trainer.save_model()
    for split in task.validation:
        prefix = f"eval{split.removeprefix('validation')}"  # MNLI has two validation sets
        scores = trainer.evaluate(encoded[split], metric_key_prefix=prefix) | {
            f"{prefix}_samples": len(encoded[split])
        }
        metrics |= keep(trainer, prefix, scores)
    return metrics
