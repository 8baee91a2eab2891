"""`transfer_attention`: closed form, layer by layer, end to end."""

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
from ..patching.sentence_transformers import model_in
from .closed_forms import require_closed_form, write_closed_forms
from .distill import (
    answer_loss,
    fresh_parameters,
    output_losses,
    pretrained_parameters,
    weight_losses,
)
from .first_order import dense_part, has_plain_logits
from .observe import Batch, LayerPair, learners_of, observing, pair_layers
from .report import LayerTransfer, TransferReport
from .resume import EndlessBatches, TransferCheckpoint

HIDDEN, ANSWERS = "hidden states", "answers"
METHODS = ("auto", "average", "distill")
NEAR = 0.2
"""The share of the learning rate for layers whose closed form holds projections of the stock layer, which is near already."""
FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices with a fused AdamW, on a processor four times as fast as the others."""
LATE = 0.3
"""The share of the learning rates for stage 3, which begins where stage 2 has led."""
AGREEMENT = 1e-4
"""Below this divergence and error a model attends as its teacher does, and there is nothing to distill."""


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

    1. *average*, in closed form: `random` takes the constant attention that diverges least from the teacher's,
       `factorized_random` its best factors; `dense`, `factorized_dense` and `salience` take the stock logits with the mean on the side that
       they don't see; and a mixture with `dot_product` starts as the stock layer.
    2. *distill*, stage 1: each layer sees the teacher's hidden states, and its logits are trained to the teacher's
       weights (KL over the rows of tokens).
    3. *distill*, stage 2: the model runs on its own hidden states, and all of it but the token embeddings is trained
       so that every layer's output is the teacher's (squared error relative to the variance).
    4. *distill*, stage 3, if `steps` names it: the same on what the head says. It is for a teacher whose head was
       trained on the task; one that is fresh has nothing to say.

    Args:
        model: a patched model, or a SentenceTransformer around one, whose answers are its embeddings.
        teacher: the stock model: a copy made before the patch, or a fine-tuned one of the same shape.
        dataloader: batches of the model's inputs as dicts, padded on the right; labels are left aside.
        method: "average" (step 1), "distill" (the others), or "auto": all, each where it applies.
        steps: optimisation steps in all, a third of them for stage 1 and none for stage 3; or (stage 1, stage 2), or
            (stage 1, stage 2, stage 3).
        learning_rate: of the fresh parameters, warmed up and then lowered to 0 in each stage; a fifth of it where `dense`
            has its closed form, which more would drive away from it.
        backbone_learning_rate: of the pretrained parameters, in stage 2. Stage 3 takes 0.3 of both rates.
        average_batches: how many batches the mean is taken over, if the dataloader has as many.
        autocast: for instance `torch.bfloat16`, to compute in mixed precision.
        checkpoint_dir: where the state is saved every `save_steps` steps. A call with the same settings goes on from
            there, and one that finds a finished transfer only loads it.
        save_steps: see above.
        progress: whether a progress bar is shown, where somebody sees it and no log file takes it.

    Raises:
        NotPatchedError, UnsupportedModelError: for a model and a teacher that do not fit.
        InvalidConfigError: for an unknown method, a method that a variant has no closed form for, stage 3 without a
            head, or bad data.
        CheckpointMismatchError: for a checkpoint of other settings.
    """
    if method not in METHODS:
        raise InvalidConfigError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    answering = (model, teacher)
    model, teacher = model_in(model), model_in(teacher)
    pairs = pair_layers(model, teacher)
    if method == "average":
        require_closed_form(pairs)
    first, second, third = _split(steps)
    distill = method != "average"
    settings = {
        "method": method,
        "steps": [first, second, third],
        "teacher": teacher.config._name_or_path,
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
        answering,
        answers=third > 0 and distill,
    )
    learners = [learner for pair in pairs for learner in learners_of(pair)]
    learning = [learner.synthesizer for learner in learners]
    near = [
        learner.synthesizer
        for learner in learners
        if method == "auto" and dense_part(learner.synthesizer) and has_plain_logits(learner.pair.teacher)
    ]
    rates = [
        (fresh_parameters(synthesizer for synthesizer in learning if synthesizer not in near), learning_rate),
        (fresh_parameters(near), NEAR * learning_rate),
    ]
    whole = [*rates, (pretrained_parameters(model, fresh_parameters(learning)), backbone_learning_rate)]
    lower = [(group, LATE * rate) for group, rate in whole]
    return transfer.run(
        average_batches if method != "distill" else 0,
        [
            _Stage("weights", first if distill else 0, rates, transfer.match_weights, "eager"),
            _Stage("outputs", second if distill else 0, whole, transfer.match_outputs),
            _Stage(ANSWERS, third if distill else 0, lower, transfer.match_answers),
        ],
    )


def _split(steps: int | tuple[int, ...]) -> tuple[int, int, int]:
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
    """A name, how many steps, parameter groups with their learning rates, what is minimised, and under which backend."""

    name: str
    steps: int
    groups: list[tuple[list[torch.nn.Parameter], float]]
    backward: Callable[[Batch], float]
    backend: str | None = None


@dataclass
class _Transfer:
    """One transfer under way: who learns from whom, on what, and where its state is kept."""

    model: PreTrainedModel
    teacher: PreTrainedModel
    pairs: list[LayerPair]
    batches: EndlessBatches
    checkpoint: TransferCheckpoint
    save_steps: int
    dtype: torch.dtype | None
    progress: bool
    answering: tuple[PreTrainedModel, PreTrainedModel]
    answers: bool
    judged_on: list[Batch] = field(default_factory=list)

    def run(self, average_batches: int, stages: list[_Stage]) -> TransferReport:
        """All steps that are still to be done."""
        state = self.checkpoint.load()
        if state is not None and state["report"]:
            self.checkpoint.fill(self.model, state)
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
            self.checkpoint.fill(self.model, state)
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
        """Step 1, where there is a closed form."""
        if not batches:
            return
        text = tqdm(
            itertools.islice(self.batches.dataloader, batches), "mean weights", disable=None if self.progress else True
        )
        with observing(*self.answering, backend="eager"), self.autocast():
            write_closed_forms(self.teacher, self.pairs, text)

    def train(self, stage: _Stage, number: int, state: dict[str, Any], before: dict, started: float) -> None:
        """One stage, from where `state` says."""
        groups: list[dict[str, Any]] = [{"params": group, "lr": rate} for group, rate in stage.groups if group]
        if not groups:
            return
        trained = [parameter for group in groups for parameter in group["params"]]
        fused = all(parameter.device.type in FUSED for parameter in trained)
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, stage.steps))
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        frozen = _freeze_all_but(self.model, trained)
        bar = tqdm(total=stage.steps, initial=state["step"], desc=stage.name, disable=None if self.progress else True)
        try:
            with observing(*self.answering, backend=stage.backend):
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
        """Stage 1: the gradient of the mean divergence."""
        total = 0.0
        with self.autocast():
            for _, loss in weight_losses(self.teacher, self.pairs, batch):
                (loss / len(self.pairs)).backward()
                total += loss.item() / len(self.pairs)
        return total

    def match_outputs(self, batch: Batch) -> float:
        """Stage 2: the gradient of the mean error of the layers' outputs."""
        with self.autocast():
            losses = output_losses(self.model, self.teacher, batch)
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.item()

    def match_answers(self, batch: Batch) -> float:
        """Stage 3: the gradient of the error of what the head says."""
        with self.autocast():
            loss = answer_loss(*self.answering, batch)
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """The divergence of each layer, under HIDDEN the error of the hidden states, and with a stage 3 that of the answers."""
        with observing(*self.answering, backend="eager"), self.autocast():
            sums = dict.fromkeys(
                [*(pair.label for pair in self.pairs), HIDDEN, *([ANSWERS] if self.answers else [])], 0.0
            )
            for batch in self.judged_on:
                for pair, loss in weight_losses(self.teacher, self.pairs, batch):
                    sums[pair.label] += loss.item()
                sums[HIDDEN] += torch.stack(output_losses(self.model, self.teacher, batch)).mean().item()
                if self.answers:
                    sums[ANSWERS] += answer_loss(*self.answering, batch).item()
        return {label: total / max(len(self.judged_on), 1) for label, total in sums.items()}

    def report(self, before: dict[str, float], steps: int, seconds: float) -> TransferReport:
        """What it all came to."""
        after = self.judge()
        layers = tuple(
            LayerTransfer(pair.label, pair.student.synthesizer.config.variant, before[pair.label], after[pair.label])
            for pair in self.pairs
        )
        errors = (before[HIDDEN], after[HIDDEN], steps, seconds, before.get(ANSWERS), after.get(ANSWERS))
        return TransferReport(layers, *errors)

    def autocast(self) -> AbstractContextManager:
        """Mixed precision, if it was asked for."""
        return torch.autocast(self.model.device.type, self.dtype) if self.dtype else nullcontext()


def _schedule(step: int, steps: int) -> float:
    """Up to 1 in the first twentieth, then down to 0 along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _freeze_all_but(model: PreTrainedModel, trained: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    wanted = {id(parameter) for parameter in trained}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
    for parameter in frozen:
        parameter.requires_grad = False
    return frozen
