"""`transfer_attention`: closed forms, then training layer by layer, then training of the whole model."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import InvalidConfigError
from ..layers.sentence_transformers import model_in
from ..synthesizers import Synthesizer
from .closed_forms import fitted_rate, require_closed_form, write_closed_forms
from .distill import (
    answer_loss,
    fresh_parameters,
    output_losses,
    pretrained_parameters,
    weight_losses,
)
from .observe import Batch, LayerPair, learners_of, observing, pair_layers
from .report import LayerTransfer, TransferReport
from .resume import EndlessBatches, TransferCheckpoint

HIDDEN, ANSWERS = "hidden states", "answers"
METHODS = ("auto", "average", "distill")
FUSED_ADAMW = ("cpu", "cuda", "mps", "xpu")
"""Device types with a fused AdamW. On a CPU it is four times as fast as the other implementations."""
ANSWER_RATE = 0.3
"""The factor of all learning rates in stage 3."""
AGREEMENT = 1e-4
"""Below this divergence and error, a model equals its teacher, and stages 1 to 3 are skipped."""


def transfer_attention(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    method: str = "auto",
    steps: int | tuple[int, int] | tuple[int, int, int] = 900,
    *,
    learning_rate: float = 5e-3,
    backbone_learning_rate: float = 3e-4,
    average_batches: int = 100,
    autocast: torch.dtype | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    save_steps: int = 200,
    progress: bool = True,
) -> TransferReport:
    """Teach a patched model, in place and without labels, to attend as its stock teacher does.

    1. *average*, in closed form. `random` takes the constant attention with the least KL divergence from the teacher's
       attention, and `factorized_random` takes the best factors for it. `dense` and `factorized_dense` take the stock logits
       with the mean key at each position in place of the key; `salience` takes them with the mean query in place of the
       query. A mixture with `dot_product` starts equal to the stock layer.
    2. *distill*, stage 1: each layer gets the teacher's hidden states. Its logits are trained so that its attention
       weights match the teacher's (KL divergence).
    3. *distill*, stage 2: the model runs on its own hidden states. All parameters but the token embeddings are trained so
       that the output of each layer matches the teacher's (squared error relative to the variance).
    4. *distill*, stage 3, only if `steps` names it: all these parameters are trained so that the logits of the model's head
       match the teacher's. Use it with a teacher whose head was trained on the task.

    Args:
        model: a patched model, or a SentenceTransformer that contains one. Its embeddings take the place of logits.
        teacher: the stock model: a copy made before the patch, or a fine-tuned one of the same shape.
        dataloader: batches of the model's inputs as dicts, padded on the right. Labels are ignored.
        method: "average" (step 1 only), "distill" (steps 2 to 4 only), or "auto" (all; step 1 where there is a closed form).
        steps: optimisation steps. A number gives a third to stage 1, the rest to stage 2 and none to stage 3. Or give
            (stage 1, stage 2) or (stage 1, stage 2, stage 3).
        learning_rate: the highest rate of the new parameters. Each stage warms it up and lowers it to 0. Layers with a closed
            form of `dense` take a fifth, because a higher rate destroys the closed form.
        backbone_learning_rate: the highest rate of the pretrained parameters, in stage 2. Stage 3 takes 0.3 of both rates.
        average_batches: the largest number of batches for the closed form.
        autocast: a dtype such as `torch.bfloat16`, to compute in mixed precision.
        checkpoint_dir: the folder where the state is saved every `save_steps` steps. A call with the same settings resumes from
            it. After a finished transfer, such a call only loads the weights.
        save_steps: see `checkpoint_dir`.
        progress: whether to show a progress bar, if stderr is a terminal.

    Raises:
        NotPatchedError, UnsupportedModelError: for a model and a teacher that do not match.
        InvalidConfigError: for an unknown method, `"average"` with a variant that has no closed form, stage 3 without a
            head, or bad data.
        CheckpointMismatchError: for a checkpoint with other settings.
    """
    if method not in METHODS:
        raise InvalidConfigError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    models_with_heads = (model, teacher)
    model, teacher = model_in(model), model_in(teacher)
    pairs = pair_layers(model, teacher)
    if method == "average":
        require_closed_form(pairs)
    first, second, third = _steps_of_stages(steps)
    distill = method != "average"
    settings = {
        "method": method,
        "steps": [first, second, third],
        "teacher": teacher.config.name_or_path,
        "layers": {pair.label: pair.student.synthesizer.config.to_dict() for pair in pairs},
        "learning_rate": learning_rate,
        "backbone_learning_rate": backbone_learning_rate,
    }
    transfer = _Transfer(
        model,
        teacher,
        pairs,
        EndlessBatches(dataloader),
        TransferCheckpoint(checkpoint_dir, settings),
        save_steps,
        autocast,
        progress and logging.is_progress_bar_enabled(),
        models_with_heads,
        measure_answers=third > 0 and distill,
    )
    learners = [learner for pair in pairs for learner in learners_of(pair)]
    synthesizers = [learner.synthesizer for learner in learners]
    by_rate: dict[float, list[Synthesizer]] = {1.0: []}
    for learner in learners:
        by_rate.setdefault(fitted_rate(learner) if method == "auto" else 1.0, []).append(learner.synthesizer)
    rates = [(fresh_parameters(group), rate * learning_rate) for rate, group in by_rate.items()]
    all_rates = [*rates, (pretrained_parameters(model, fresh_parameters(synthesizers)), backbone_learning_rate)]
    answer_rates = [(group, ANSWER_RATE * rate) for group, rate in all_rates]
    return transfer.run(
        average_batches if method != "distill" else 0,
        [
            _Stage("weights", first if distill else 0, rates, transfer.match_weights, "eager"),
            _Stage("outputs", second if distill else 0, all_rates, transfer.match_outputs),
            _Stage(ANSWERS, third if distill else 0, answer_rates, transfer.match_answers),
        ],
    )


def _steps_of_stages(steps: int | tuple[int, ...]) -> tuple[int, int, int]:
    split = (steps // 3, steps - steps // 3) if isinstance(steps, int) else steps
    if (
        not isinstance(split, (tuple, list))
        or len(split) not in (2, 3)
        or any(not isinstance(count, int) or count < 0 for count in split)
    ):
        raise InvalidConfigError(
            f"steps must be a number of steps ≥ 0, or those of each stage, (1, 2) or (1, 2, 3), not {steps!r}."
        )
    first, second, third = (*split, 0)[:3]
    return first, second, third


@dataclass
class _Stage:
    """A stage of training: its parameter groups with learning rates, its loss, and its attention backend."""

    name: str
    steps: int
    groups: list[tuple[list[torch.nn.Parameter], float]]
    backward: Callable[[Batch], float]
    backend: str | None = None


@dataclass
class _Transfer:
    """A running transfer: model, teacher, data, and the file for its state."""

    model: PreTrainedModel
    teacher: PreTrainedModel
    pairs: list[LayerPair]
    batches: EndlessBatches
    checkpoint: TransferCheckpoint
    save_steps: int
    dtype: torch.dtype | None
    progress: bool
    models_with_heads: tuple[PreTrainedModel, PreTrainedModel]
    measure_answers: bool
    judged_on: list[Batch] = field(default_factory=list)

    def run(self, average_batches: int, stages: list[_Stage]) -> TransferReport:
        """Run all remaining steps."""
        state = self.checkpoint.load()
        if state is not None and state["report"]:
            self.checkpoint.load_weights(self.model, state)
            return TransferReport.from_dict(json.loads(state["report"]))
        started = time.perf_counter()
        if state is None:
            self.judged_on = [batch for batch in itertools.islice(self.batches.dataloader, 4)]
            if not self.judged_on:
                raise InvalidConfigError("The dataloader yields no batch. A transfer needs at least one.")
            before = self.judge()
            self.average(average_batches)
            state = {"stage": 0, "step": 0, "before": before, "seconds": 0.0}
        else:
            self.checkpoint.load_weights(self.model, state)
            self.batches.load_state_dict(state["batches"])
            before, self.judged_on = state["before"], state["judged_on"]
            started -= state["seconds"]
        agreed = max(self.judge().values()) < AGREEMENT
        for number, stage in enumerate(stages):
            if number >= state["stage"] and stage.steps and not agreed:
                self.train(stage, number, state if number == state["stage"] else {"step": 0}, before, started)
        report = self.report(before, 0 if agreed else sum(s.steps for s in stages), time.perf_counter() - started)
        self.checkpoint.save({"model": self.model.state_dict(), "report": json.dumps(report.to_dict())})
        return report

    def average(self, batches: int) -> None:
        """Step 1: write the closed forms, where there are any."""
        if not batches:
            return
        text = tqdm(
            itertools.islice(self.batches.dataloader, batches), "mean weights", disable=None if self.progress else True
        )
        with observing(*self.models_with_heads, backend="eager"), self.autocast():
            write_closed_forms(self.teacher, self.pairs, text)

    def train(self, stage: _Stage, number: int, state: dict[str, Any], before: dict, started: float) -> None:
        """Run one stage, from the step in `state`."""
        groups: list[dict[str, Any]] = [{"params": group, "lr": rate} for group, rate in stage.groups if group]
        if not groups:
            return
        trained = [parameter for group in groups for parameter in group["params"]]
        fused = all(parameter.device.type in FUSED_ADAMW for parameter in trained)
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, stage.steps))
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        frozen = _freeze_all_but(self.model, trained)
        bar = tqdm(total=stage.steps, initial=state["step"], desc=stage.name, disable=None if self.progress else True)
        try:
            with observing(*self.models_with_heads, backend=stage.backend):
                for step in range(state["step"], stage.steps):
                    bar.set_postfix(loss=f"{stage.backward(next(self.batches)):.4f}")
                    torch.nn.utils.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad(set_to_none=True)
                    bar.update()
                    if (step + 1) % self.save_steps == 0:
                        self.checkpoint.save(
                            {
                                "model": self.model.state_dict(),
                                "optimizer": optimizer.state_dict(),
                                "scheduler": scheduler.state_dict(),
                                "batches": self.batches.state_dict(),
                                "stage": number,
                                "step": step + 1,
                                "before": before,
                                "judged_on": [dict(batch) for batch in self.judged_on],
                                "seconds": time.perf_counter() - started,
                                "report": "",
                            }
                        )
        finally:
            bar.close()
            for parameter in frozen:
                parameter.requires_grad = True
            self.model.zero_grad(set_to_none=True)

    def match_weights(self, batch: Batch) -> float:
        """Stage 1: backward of the mean divergence."""
        total = 0.0
        with self.autocast():
            for _, loss in weight_losses(self.teacher, self.pairs, batch):
                (loss / len(self.pairs)).backward()
                total += loss.item() / len(self.pairs)
        return total

    def match_outputs(self, batch: Batch) -> float:
        """Stage 2: backward of the mean error of the layers' outputs."""
        with self.autocast():
            losses = output_losses(self.model, self.teacher, batch)
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.item()

    def match_answers(self, batch: Batch) -> float:
        """Stage 3: backward of the error of the answers."""
        with self.autocast():
            loss = answer_loss(*self.models_with_heads, batch)
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """The divergence of each layer, the error of the hidden states (HIDDEN), and with stage 3 that of the answers (ANSWERS)."""
        with observing(*self.models_with_heads, backend="eager"), self.autocast():
            sums = dict.fromkeys(
                [*(pair.label for pair in self.pairs), HIDDEN, *([ANSWERS] if self.measure_answers else [])], 0.0
            )
            for batch in self.judged_on:
                for pair, loss in weight_losses(self.teacher, self.pairs, batch):
                    sums[pair.label] += loss.item()
                sums[HIDDEN] += torch.stack(output_losses(self.model, self.teacher, batch)).mean().item()
                if self.measure_answers:
                    sums[ANSWERS] += answer_loss(*self.models_with_heads, batch).item()
        return {label: total / max(len(self.judged_on), 1) for label, total in sums.items()}

    def report(self, before: dict[str, float], steps: int, seconds: float) -> TransferReport:
        """Measure again, and report before and after."""
        after = self.judge()
        layers = tuple(
            LayerTransfer(pair.label, pair.student.synthesizer.config.variant, before[pair.label], after[pair.label])
            for pair in self.pairs
        )
        errors = (before[HIDDEN], after[HIDDEN], steps, seconds, before.get(ANSWERS), after.get(ANSWERS))
        return TransferReport(layers, *errors)

    def autocast(self) -> AbstractContextManager:
        """Mixed precision, if the caller chose a dtype."""
        return torch.autocast(self.model.device.type, self.dtype) if self.dtype else nullcontext()


def _schedule(step: int, steps: int) -> float:
    """The factor of the learning rate: up to 1 in the first twentieth, then down to 0 along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _freeze_all_but(model: PreTrainedModel, trained: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    trained_ids = {id(parameter) for parameter in trained}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in trained_ids]
    for parameter in frozen:
        parameter.requires_grad = False
    return frozen
