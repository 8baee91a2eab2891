"""A plain training loop for the demo and the benchmarks, which time it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from hf_synthesizer.glue.tasks import Task, official_metrics, predictions_of
from hf_synthesizer.transfer.variation import Rows


class GroupedBatches:
    """Batches of rows of about the same length, in a new order in each pass.

    Grouping saves padding: rows are drawn in groups of 50 batches, and sorted by length in each group.
    """

    def __init__(self, rows: Rows, batch_size: int, collate: Callable[[Rows], dict], *, seed: int | None = 0):
        self.rows, self.batch_size, self.collate = rows, batch_size, collate
        self.random = None if seed is None else random.Random(seed)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(len(self.rows)))
        if self.random is not None:
            self.random.shuffle(order)
        size = self.batch_size
        group = 50 * size
        batches = []
        for start in range(0, len(order), group):
            near = sorted(order[start : start + group], key=lambda number: len(self.rows[number]["input_ids"]))
            batches += [near[i : i + size] for i in range(0, len(near), size)]
        if self.random is not None:
            self.random.shuffle(batches)
        for numbers in batches:
            yield dict(self.collate([self.rows[number] for number in numbers]))


def unlabelled(rows: Rows) -> Rows:
    """The rows without labels, for a transfer."""
    return [{name: value for name, value in row.items() if name != "labels"} for row in rows]


def finetune(
    model: PreTrainedModel,
    batches: GroupedBatches,
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float = 0.01,
    description: str = "fine-tuning",
    progress: bool = True,
) -> float:
    """Train with AdamW in bf16 autocast, and return the seconds. The rate rises for 6 % of the steps, then falls to 0."""
    started = time.perf_counter()
    total = epochs * len(batches)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=learning_rate,
        weight_decay=weight_decay,
        fused=True,
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.06 * total), total)
    model.train()
    with tqdm(total=total, desc=description, disable=None if progress else True) as bar:
        for _ in range(epochs):
            for batch in batches:
                with autocast(model):
                    loss = model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                bar.set_postfix(loss=f"{loss.item():.3f}")
                bar.update()
    return time.perf_counter() - started


@torch.no_grad()
def outputs_of(
    model: PreTrainedModel, rows: Rows, collate: Callable[[Rows], dict], batch_size: int = 64
) -> np.ndarray:
    """The model's outputs (rows, labels), in the order of the rows."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]["input_ids"]))
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch = dict(collate([rows[number] for number in numbers]))
        batch.pop("labels", None)
        with autocast(model):
            logits = model(**batch).logits.float()
        found.update(zip(numbers, logits.numpy(), strict=True))
    return np.stack([found[number] for number in range(len(rows))])


def score(
    model: PreTrainedModel, task: Task, rows: Rows, collate: Callable[[Rows], dict]
) -> tuple[float, dict[str, float]]:
    """The task's official main metric on the rows, and all its metrics."""
    predictions = predictions_of(task, outputs_of(model, rows, collate))
    metrics = official_metrics(task, predictions, np.asarray([row["labels"] for row in rows]))
    return task.score(metrics), metrics


def examples_per_second(
    model: PreTrainedModel,
    rows: Rows,
    collate: Callable[[Rows], dict],
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The speed of inference without tokenization: the best of some passes over the same rows."""
    rows = rows[:512]
    best = 0.0
    for _ in range(repeats):
        started = clock()
        outputs_of(model, rows, collate)
        best = max(best, len(rows) / (clock() - started))
    return best


def autocast(model: PreTrainedModel) -> torch.autocast:
    """bf16 autocast on the model's device. Even on a CPU it is twice as fast as float32."""
    return torch.autocast(model.device.type, torch.bfloat16)
