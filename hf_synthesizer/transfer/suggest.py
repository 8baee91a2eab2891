"""`suggest_layers` and `suggest_heads`: which layers or heads to synthesize at the least cost."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.fresh_heads import fresh_weights
from ..errors import AlreadyPatchedError, InvalidConfigError
from ..layers.finding.attention_layers import find_attention_layers
from ..layers.finding.projections import query_heads
from ..layers.patched import is_patched
from ..layers.sentence_transformers import model_in
from ..patching.swap import patch_model
from ..synthesizers.config import SynthesizerConfig
from .budgets import Budget, ResourceBudget, budgets_of, count_of
from .closed_forms import has_closed_form
from .distill import relative_error, states_of, weight_losses
from .head_gates import change_of_answers, gated, head_costs
from .head_menu import Key, menu_of, shape_of
from .observe import Batch, LayerPair, observing, on_device, pair_layers
from .resume import EndlessBatches
from .run import transfer_attention
from .suggestion import Suggestion

logger = logging.get_logger(__name__)

Kind = str | SynthesizerConfig | Mapping[str, Any]
"""A kind of heads: a variant, a configuration, or a dict of one."""

LastStates = tuple[torch.Tensor, torch.Tensor | None]
"""The last hidden states of a stack and their token mask."""
STEPS = 150
"""Training steps (stage 1 of a transfer) for a variant without a closed form."""
ANNOUNCED_STEPS = 20
"""From this number of steps on, a warning says in advance how long the training takes."""


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
    """Measure the cost of synthesizing each layer, and suggest a hybrid.

    A copy of the teacher gets synthesized attention in all layers, and its logits are trained for a few steps to match the
    teacher's attention weights (`transfer_attention`, stage 1). Then these layers replace layers of the teacher one by one:
    each time the layer that changes the last hidden states least, until the budget is used up.

    Args:
        teacher: a stock model. It is not changed.
        dataloader: batches of its inputs, as for `transfer_attention`.
        variant: the variant of the chosen layers.
        budget: how many layers to synthesize: a share (a float in (0, 1], rounded up), or a number (an int).
        steps: training steps of the logits.
        batches: the number of batches on which costs are measured.
        autocast: a dtype such as `torch.bfloat16`, for mixed precision.
        progress: whether to show a progress bar, if stderr is a terminal.
        **options: options of `patch_model`, such as `max_length`.

    Raises:
        AlreadyPatchedError: for a teacher that is patched.
        InvalidConfigError: for a budget out of range.
    """
    teacher = _require_stock(teacher, "suggest_layers")
    keys = _keys(teacher)
    count = count_of(budget, len(keys), "layers")
    pairs = _trained_pairs(teacher, dataloader, variant, steps, autocast, progress, options)
    measured = [dict(batch) for batch in itertools.islice(dataloader, batches)]
    probe = copy.deepcopy(teacher)
    costs: dict[str, float] = {}
    total: dict[str, float] = {}
    with observing(teacher, probe), torch.no_grad(), _mixed_precision(teacher, autocast):
        targets = [_last_states(teacher, batch) for batch in measured]
        while len(total) < count:
            chosen = [pair for pair in pairs if pair.label in total]
            rest = [pair for pair in pairs if pair.label not in total]
            trials = {pair.label: _cost_of(probe, [*chosen, pair], measured, targets) for pair in rest}
            costs = costs or trials  # the first trials swap one layer each
            best = min(trials, key=trials.__getitem__)
            total[best] = trials[best]
    return Suggestion({keys[label]: variant for label in sorted(total, key=list(keys).index)}, costs, total)


def suggest_heads(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: Kind | Iterable[Kind] | None = None,
    budget: Budget | Iterable[Budget] = 0.9,
    *,
    variants: Iterable[Kind] | None = None,
    whole_keys: bool = True,
    trained_head: bool | None = None,
    steps: int | None = None,
    batches: int = 8,
    autocast: torch.dtype | None = None,
    progress: bool = True,
    **options: Any,
) -> Suggestion:
    """Measure how synthesizing each head changes the answers, and suggest which heads to synthesize.

    A copy of the teacher gets synthesized attention in all heads, in closed form if the variant has one. Then each head of the
    teacher gets a gate between its own output and that of the synthesized head. The derivative of the answers with respect to
    the gate approximates to first order how the answers change if this head alone is synthesized. Its mean square over rows is
    the cost of the head. One forward pass and a few backward passes measure all heads. At the end, the joint change for the
    chosen heads is measured exactly.

    With a menu of several kinds of heads, each kind is measured in this way, and each head gets one of them or stays stock, so that
    the sum of costs is small. For a share or a number of heads, each head has its cheapest kind. For a share of the cache or of the
    multiply-adds, heads step one after the other to kinds that need less, those first that add the least cost for what they save
    (`cheapest.sweep`). So plans are nested: a smaller budget takes the same steps and some more. Each plan is the cheapest of all that
    need no more than it does.

    The answers are the logits of the model's head (minus their mean over several classes). A model without a head answers with its
    last hidden states, and a SentenceTransformer with its embeddings. For a task, take a model that was fine-tuned on
    it. If the checkpoint has no weights for the head, Transformers initialises it at random: then pass `trained_head=False`.

    Args:
        teacher: a stock model. It is not changed.
        dataloader: batches of its inputs, as for `transfer_attention`.
        variant: the variant of the chosen heads; or a menu, a list of variants, configurations, or dicts such as
            `{"variant": "dot_product", "window": 64}`.
        budget: how many heads to synthesize: a share of all (a float in (0, 1], rounded up), or a number (an int). Or what attention
            may still need at a length, as a share of stock's: bytes of the cache, `{"cache": 0.3, "length": 8192}`, or
            multiply-adds, `{"multiply_adds": 0.5, "length": 2048}`. With several budgets, the suggestion is for the last, and
            `curve` has the joint change for each.
        variants: a menu, instead of `variant`.
        whole_keys: whether heads that share a key (grouped-query attention) are chosen together, by their mean cost. A decoder's
            cache must keep a key until all heads that use it are synthesized. If False, each head is chosen by its own cost.
        trained_head: False takes the last hidden states as answers, even if the model has a head. This is the default, with
            a warning, for a model that the command line or an example loaded without weights for its head.
        steps: training steps of the logits. Default: 150 if the variant has no closed form, else none.
        batches: the number of batches on which costs are measured.
        autocast: a dtype such as `torch.bfloat16`, for mixed precision.
        progress: whether to show a progress bar, if stderr is a terminal.
        **options: options of `patch_model`, such as `max_length`. With a menu they are for all kinds.

    Raises:
        AlreadyPatchedError: for a teacher that is patched.
        InvalidConfigError: for a budget out of range, or a menu that is empty or names a kind twice.
        UnsupportedModelError: for layers whose heads cannot be told apart, or a variant that the model cannot take.
    """
    teacher_with_head, teacher = teacher, _require_stock(teacher, "suggest_heads")
    if (variant is None) == (variants is None):
        raise InvalidConfigError("Name the new attention once: a variant, or a menu of them in a list.")
    menu = menu_of(variant if variants is None else list(variants), options)
    keys, budgets = _keys(teacher), budgets_of(budget)
    attention_layers, _ = find_attention_layers(teacher)
    heads = {layer.label: query_heads(layer.module) for layer in attention_layers}
    use_head = _has_trained_head(teacher) if trained_head is None else trained_head
    shapes = {keys[layer.label]: shape_of(layer, teacher) for layer in attention_layers}
    shared = {key: shape.sharing for key, shape in shapes.items()} if whole_keys else None

    def suggest(costs: list[dict[Key, list[float]]]) -> Suggestion:
        return Suggestion.of_heads(menu, costs, budgets[-1], shared=shared, shapes=shapes)

    # What cannot be is refused before anything is measured.
    trial = suggest([{keys[label]: [1.0] * count for label, count in heads.items()} for _ in menu])
    sizes = sorted(
        {trial.size_of(each) for each in budgets}, key=lambda size: (isinstance(size, ResourceBudget), size)
    )
    for kind in menu[1:]:
        patch_model(copy.deepcopy(teacher), kind)
    pairs = [_trained_pairs(teacher, dataloader, kind, steps, autocast, progress, {}) for kind in menu]
    measured = [dict(batch) for batch in itertools.islice(dataloader, batches)]
    students = [pair.student.eval() for pairs_of_kind in pairs for pair in pairs_of_kind]
    with (
        _without_parameter_gradients(teacher_with_head, *students),
        observing(teacher_with_head),
        ExitStack() as stack,
        _mixed_precision(teacher, autocast),
    ):
        gates = [stack.enter_context(gated(pairs_of_kind)) for pairs_of_kind in pairs]
        costs_by_label = [head_costs(teacher_with_head, kind, measured, heads, use_head) for kind in gates]
        costs = [{keys[label]: row for label, row in rows.items()} for rows in costs_by_label]
        suggestion = suggest(costs)
        for size in sizes:
            by_kind = suggestion.at(size).heads_by_kind
            chosen = [{label: by_kind[kind].get(key, []) for label, key in keys.items()} for kind in menu]
            suggestion.curve[size] = change_of_answers(teacher_with_head, gates, measured, chosen, heads, use_head)
    return suggestion


@contextmanager
def _without_parameter_gradients(*modules: nn.Module) -> Iterator[None]:
    """Inside the context, no parameter requires a gradient: only the gates do."""
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


def _require_stock(teacher: PreTrainedModel, function: str) -> PreTrainedModel:
    """The Transformers model in a teacher; `AlreadyPatchedError` if it is patched."""
    model = model_in(teacher)
    if is_patched(model):
        raise AlreadyPatchedError(f"{function} needs a stock model; this one is patched already.")
    return model


def _mixed_precision(model: PreTrainedModel, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(model.device.type, dtype, dtype is not None)


def _has_trained_head(teacher: PreTrainedModel) -> bool:
    fresh = fresh_weights(teacher)
    if fresh:
        logger.warning(
            "The checkpoint has no weights for %s of %s: Transformers initialised %d tensors at random. Heads are judged by the "
            "last hidden states, and not by the answers of such a head.",
            fresh[0],
            type(teacher).__name__,
            len(fresh),
        )
    return not fresh


def _keys(teacher: PreTrainedModel) -> dict[str, int | str]:
    """The key of each layer in a hybrid: its index if the model has one stack, else its label."""
    attention_layers, _ = find_attention_layers(teacher)
    one_stack = len({layer.stack for layer in attention_layers}) == 1
    return {layer.label: layer.index if one_stack else layer.label for layer in attention_layers}


def _trained_pairs(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: str | SynthesizerConfig,
    steps: int | None,
    autocast: torch.dtype | None,
    progress: bool,
    options: dict[str, Any],
) -> list[LayerPair]:
    """Pair the layers of a synthesized copy with the teacher's, after the closed form and some steps of stage 1."""
    student = patch_model(copy.deepcopy(teacher), variant, **options)
    if steps is None:
        steps = 0 if all(map(has_closed_form, pair_layers(student, teacher))) else STEPS
    if steps >= ANNOUNCED_STEPS:
        _announce_duration(student, teacher, dataloader, steps, autocast)
    transfer_attention(student, teacher, dataloader, steps=(steps, 0), autocast=autocast, progress=progress)
    return pair_layers(student, teacher)


def _announce_duration(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    steps: int,
    autocast: torch.dtype | None,
) -> None:
    """Time one step, and warn how long all steps take. The dataloader's random state is restored."""
    batches = EndlessBatches(dataloader)
    started, batch = time.perf_counter(), next(batches, None)
    if batch is None:
        return
    with observing(student, teacher, backend="eager"), _mixed_precision(teacher, autocast):
        for _, loss in weight_losses(teacher, pair_layers(student, teacher), batch):
            if loss.requires_grad:
                loss.backward()
    student.zero_grad(set_to_none=True)
    batches.rewind()
    seconds = steps * (time.perf_counter() - started)
    duration = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
    logger.warning(
        "The synthesized logits are trained for %d steps before costs are measured. This takes about %s here. Give steps=… "
        "for fewer steps: the costs are then less reliable.",
        steps,
        duration,
    )


def _cost_of(
    probe: nn.Module, chosen: list[LayerPair], measured: list[Batch], targets: list[list[LastStates]]
) -> float:
    """The error of the last hidden states when these layers are synthesized."""
    stock = {pair.name: probe.get_submodule(pair.name) for pair in chosen}
    for pair in chosen:
        probe.set_submodule(pair.name, pair.student)
    try:
        errors = [
            relative_error(states, target, keep)
            for batch, batch_targets in zip(measured, targets, strict=True)
            for (states, keep), (target, _) in zip(_last_states(probe, batch), batch_targets, strict=True)
        ]
        return float(torch.stack(errors).mean())
    finally:
        for name, module in stock.items():
            probe.set_submodule(name, module)


def _last_states(model: nn.Module, batch: Batch) -> list[LastStates]:
    output = model(**on_device(batch, cast(PreTrainedModel, model)), output_hidden_states=True)
    return [(states[-1], keep) for states, keep in states_of(output, batch)]
