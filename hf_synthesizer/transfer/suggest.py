"""`suggest_layers` and `suggest_heads`: what can be synthesized at the least cost."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.fresh_heads import fresh_weights
from ..errors import AlreadyPatchedError
from ..layers.attention_layers import find_attention_layers
from ..layers.patched import is_patched
from ..layers.projections import query_heads, value_heads
from ..layers.sentence_transformers import model_in
from ..patching.swap import patch_model
from ..synthesizers.config import SynthesizerConfig
from .closed_forms import has_closed_form
from .distill import answers_of, relative_error, states_of, weight_losses
from .head_gates import HeadGates, gated
from .observe import Batch, LayerPair, observing, on_device, pair_layers
from .resume import EndlessBatches
from .run import transfer_attention
from .suggestion import Budget, HeadSuggestion, Suggestion, budgets_of, count_of

logger = logging.get_logger(__name__)

LastStates = tuple[torch.Tensor, torch.Tensor | None]
"""The last hidden states of a stack, and which of their places are tokens."""
STEPS = 150
"""Of stage 1, for a variant without a closed form."""
ANNOUNCED = 20
"""From how many steps on a suggestion says beforehand how long they take."""
PROBES = 8
"""How many directions of the answers are looked into, at most."""


def suggest_layers(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: str | SynthesizerConfig,
    budget: Budget = 0.5,
    *,
    steps: int = STEPS,
    batches: int = 8,
    autocast: torch.dtype | None = None,
    progress: bool = True,
    **options: Any,
) -> Suggestion:
    """Measure layer by layer what a swap would cost, and suggest a hybrid.

    In a copy of the teacher every layer is synthesized and its logits trained to the teacher's weights for a few steps
    (`transfer_attention`, stage 1). Then the layers are swapped into the teacher one after the other, each time the one
    that changes the last hidden states least, until the budget is used up.

    Args:
        teacher: a stock model, which is left as it is.
        dataloader: batches of its inputs, as for `transfer_attention`.
        variant: what the chosen layers get.
        budget: how many layers to synthesize: a share of them (a float in (0, 1], rounded up), or a number (an int).
        steps: training steps of the logits.
        batches: how many batches each swap is measured on.
        autocast: for instance `torch.bfloat16`.
        progress: whether a progress bar is shown, where somebody sees it and no log file takes it.
        **options: as for `patch_model`, such as `max_length`.

    Raises:
        AlreadyPatchedError: for a teacher that is no stock model.
        InvalidConfigError: for a budget out of range.
    """
    teacher = model_in(teacher)
    _require_stock(teacher, "suggest_layers")
    keys = _keys(teacher)
    count = count_of(budget, len(keys), "layers")
    pairs = _taught(teacher, dataloader, variant, steps, autocast, progress, options)
    measured = [dict(batch) for batch in itertools.islice(dataloader, batches)]
    probe = copy.deepcopy(teacher)
    with (
        observing(teacher, probe),
        torch.no_grad(),
        torch.autocast(teacher.device.type, autocast, autocast is not None),
    ):
        wanted = [_last_states(teacher, batch) for batch in measured]

        def cost(chosen: list[LayerPair]) -> float:
            return _cost_of(probe, chosen, measured, wanted)

        costs = {pair.label: cost([pair]) for pair in pairs}
        chosen: list[LayerPair] = []
        total: dict[str, float] = {}
        while len(chosen) < count:
            rest = [pair for pair in pairs if pair not in chosen]
            trials = {pair.label: cost([*chosen, pair]) for pair in rest}
            best = min(rest, key=lambda pair: trials[pair.label])
            chosen.append(best)
            total[best.label] = trials[best.label]
    return Suggestion({keys[label]: variant for label in sorted(total, key=list(keys).index)}, costs, total)


def suggest_heads(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: str | SynthesizerConfig,
    budget: Budget | Iterable[Budget] = 0.9,
    *,
    whole_keys: bool = True,
    trained_head: bool | None = None,
    steps: int | None = None,
    batches: int = 8,
    autocast: torch.dtype | None = None,
    progress: bool = True,
    **options: Any,
) -> HeadSuggestion:
    """Measure head by head what a swap would do to the answers, and suggest which heads can do without comparing tokens.

    In a copy of the teacher all heads are synthesized, in closed form where the variant has one. Then each head of the teacher
    gets a gate g between what it gives and what the synthesized one would. The derivative of the answers by the gate of one row
    is, to the first order, how the swap of that head alone changes them: its mean square is the head's cost, and one pass
    forward and a few back measure all heads at once. What the chosen heads do together is then measured as it is.

    Answers are what the head of the model says (logits, less their mean where there are several classes), or the last hidden
    states of a model without one, or the embeddings of a SentenceTransformer. A model that was fine-tuned on a task knows best which of its heads the task needs.
    Transformers draws a head at random where the checkpoint has none: say `trained_head=False` then.

    Args:
        teacher: a stock model, which is left as it is.
        dataloader: batches of its inputs, as for `transfer_attention`.
        variant: what the chosen heads get.
        budget: how many heads to synthesize: a share of all (a float in (0, 1], rounded up), or a number (an int). Of several
            the last one is what the suggestion is for; all are measured (`curve`).
        whole_keys: whether heads that share a key (grouped-query attention) are chosen together, by their mean cost: a decoder's
            cache keeps that key as long as one of them compares tokens. If not, each head is judged by itself.
        trained_head: False takes the last hidden states as answers, whatever head the model has. By default so for a model that
            the command line or an example loaded without weights for its head, with a warning.
        steps: training steps of the logits; by default 150 where the variant has no closed form, else none.
        batches: how many batches the costs are measured on.
        autocast: for instance `torch.bfloat16`.
        progress: whether a progress bar is shown, where somebody sees it and no log file takes it.
        **options: as for `patch_model`, such as `max_length`.

    Raises:
        AlreadyPatchedError: for a teacher that is no stock model.
        InvalidConfigError: for a budget out of range.
        UnsupportedModelError: for layers whose heads cannot be told apart.
    """
    answering, teacher = teacher, model_in(teacher)
    _require_stock(teacher, "suggest_heads")
    keys, budgets = _keys(teacher), budgets_of(budget)
    modules = {attention_layer.label: attention_layer.module for attention_layer in find_attention_layers(teacher)[0]}
    heads = {label: query_heads(module) for label, module in modules.items()}
    heads_of_a_key = {label: heads[label] // value_heads(module) for label, module in modules.items()}
    counts = sorted({count_of(one, sum(heads.values()), "heads") for one in budgets})
    config = variant if isinstance(variant, SynthesizerConfig) else SynthesizerConfig(variant)
    head = _has_trained_head(teacher) if trained_head is None else trained_head
    pairs = _taught(teacher, dataloader, config, steps, autocast, progress, options)
    measured = [dict(batch) for batch in itertools.islice(dataloader, batches)]
    students = [pair.student.eval() for pair in pairs]
    mixed = torch.autocast(teacher.device.type, autocast, autocast is not None)
    with _frozen(answering, *students), observing(answering), gated(pairs) as gates, mixed:
        costs = head_costs(answering, gates, measured, {label: heads[label] for label in keys}, head)
        own = SynthesizerConfig.create(**{**config.to_dict(), **options})
        shared = {keys[label]: count for label, count in heads_of_a_key.items() if whole_keys}
        suggestion = HeadSuggestion(
            own, {keys[label]: row for label, row in costs.items()}, budgets[-1], shared=shared
        )
        labels = {key: label for label, key in keys.items()}
        for count in counts:
            chosen = {labels[key]: row for key, row in suggestion.at(count).heads.items()}
            suggestion.curve[count] = change_of_answers(answering, gates, measured, chosen, heads, head)
    return suggestion


def head_costs(
    teacher: PreTrainedModel, gates: HeadGates, measured: list[Batch], heads: dict[str, int], trained_head: bool = True
) -> dict[str, list[float]]:
    """For each head the mean square of the derivative of a row's answers by its gate, relative to the answers' own square."""
    sums = {label: torch.zeros(count, dtype=torch.float64) for label, count in heads.items()}
    power = 0.0
    for batch in measured:
        gates.set, gates.open_to_gradients, gates.made = {}, True, {}
        answers = answers_of(teacher, batch, trained_head)
        power += float(answers.detach().double().square().sum())
        made = dict(gates.made)
        for direction, share in _directions(answers):
            slopes = torch.autograd.grad(
                (answers * direction).sum(), list(made.values()), retain_graph=True, allow_unused=True
            )
            for label, slope in zip(made, slopes, strict=True):
                if slope is not None:
                    sums[label] += share * slope.detach().double().square().sum(0).cpu()
    gates.open_to_gradients, gates.made = False, {}
    return {label: (total / max(power, torch.finfo(torch.float32).tiny)).tolist() for label, total in sums.items()}


def _directions(answers: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
    """Directions in the space of a row's answers, and their shares, so that Σ share · (direction · x)² is |x|²: each number by
    itself where these are few, else some at random, where it is so on the mean."""
    numbers = answers[0].numel()
    if numbers <= PROBES:
        for number in range(numbers):
            direction = torch.zeros_like(answers).flatten(1)
            direction[:, number] = 1
            yield direction.view_as(answers), 1.0
        return
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        signs = torch.randint(2, answers.shape, generator=generator).mul(2).sub(1)
        yield signs.to(answers), 1 / PROBES


@torch.no_grad()
def change_of_answers(
    teacher: PreTrainedModel,
    gates: HeadGates,
    measured: list[Batch],
    chosen: dict[str, list[int]],
    heads: dict[str, int],
    trained_head: bool = True,
) -> float:
    """`Σ |answers with these heads synthesized − stock answers|² / Σ |stock answers|²`."""
    change = power = 0.0
    for batch in measured:
        gates.choose({}, heads)
        stock = answers_of(teacher, batch, trained_head).double()
        gates.choose(chosen, heads)
        change += float((answers_of(teacher, batch, trained_head).double() - stock).square().sum())
        power += float(stock.square().sum())
    gates.choose({}, heads)
    return change / max(power, torch.finfo(torch.float32).tiny)


@contextmanager
def _frozen(*modules: nn.Module) -> Iterator[None]:
    """Inside, no parameter asks for a gradient: what is measured are gates."""
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


def _require_stock(teacher: PreTrainedModel, what: str) -> None:
    if is_patched(teacher):
        raise AlreadyPatchedError(f"{what} measures swaps in a stock model; this one is patched already.")


def _has_trained_head(teacher: PreTrainedModel) -> bool:
    drawn = fresh_weights(teacher)
    if drawn:
        logger.warning(
            "The checkpoint has no weights for %s of %s: Transformers drew %d tensors at random. Heads are judged by the last "
            "hidden states, and not by what such a head answers.",
            drawn[0],
            type(teacher).__name__,
            len(drawn),
        )
    return not drawn


def _keys(teacher: PreTrainedModel) -> dict[str, int | str]:
    """What a hybrid calls each layer: by its index where there is one stack, else by its label."""
    attention_layers, _ = find_attention_layers(teacher)
    one_stack = len({attention_layer.stack for attention_layer in attention_layers}) == 1
    return {
        attention_layer.label: attention_layer.index if one_stack else attention_layer.label
        for attention_layer in attention_layers
    }


def _taught(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: str | SynthesizerConfig,
    steps: int | None,
    autocast: torch.dtype | None,
    progress: bool,
    options: dict[str, Any],
) -> list[LayerPair]:
    """All layers of a synthesized copy beside the teacher's, after the closed form and some steps of stage 1."""
    student = patch_model(copy.deepcopy(teacher), variant, **options)
    if steps is None:
        steps = 0 if all(map(has_closed_form, pair_layers(student, teacher))) else STEPS
    if steps >= ANNOUNCED:
        _announce(student, teacher, dataloader, steps, autocast)
    transfer_attention(student, teacher, dataloader, steps=(steps, 0), autocast=autocast, progress=progress)
    return pair_layers(student, teacher)


def _announce(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    steps: int,
    autocast: torch.dtype | None,
) -> None:
    """Say how long the steps will take, by one of them; the batches that follow are those that would have come anyway."""
    batches = EndlessBatches(dataloader)
    started, batch = time.perf_counter(), next(batches, None)
    if batch is None:
        return
    with (
        observing(student, teacher, backend="eager"),
        torch.autocast(teacher.device.type, autocast, autocast is not None),
    ):
        for _, loss in weight_losses(teacher, pair_layers(student, teacher), batch):
            if loss.requires_grad:
                loss.backward()
    student.zero_grad(set_to_none=True)
    seconds = steps * (time.perf_counter() - started)
    batches.rewind()
    logger.warning(
        "Before anything is measured the synthesized logits are trained for %d steps, which takes about %s here. Say steps=… for "
        "fewer: the costs are then less sure.",
        steps,
        f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds",
    )


def _cost_of(
    probe: nn.Module, chosen: list[LayerPair], measured: list[Batch], wanted: list[list[LastStates]]
) -> float:
    stock = {pair.name: probe.get_submodule(pair.name) for pair in chosen}
    for pair in chosen:
        probe.set_submodule(pair.name, pair.student)
    try:
        errors = [
            relative_error(states, target, keep)
            for batch, targets in zip(measured, wanted, strict=True)
            for (states, keep), (target, _) in zip(_last_states(probe, batch), targets, strict=True)
        ]
        return float(torch.stack(errors).mean())
    finally:
        for name, module in stock.items():
            probe.set_submodule(name, module)


def _last_states(model: nn.Module, batch: Batch) -> list[LastStates]:
    output = model(**on_device(batch, cast(PreTrainedModel, model)), output_hidden_states=True)
    return [(states[-1], keep) for states, keep in states_of(output, batch)]
