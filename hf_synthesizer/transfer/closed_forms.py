"""Step 1 of a transfer: parameters in closed form, from one pass over some batches without gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..errors import InvalidConfigError
from .average import MeanWeights, has_dot_product, restore_dot_product, table_parts, write_mean_weights
from .distill import divergences
from .first_order import MeanStates, Scale, candidate_scales, first_order_parts, has_plain_logits, write_first_order
from .observe import Batch, Call, LayerPair, Learner, learners_of, observe_calls, synthesized_weights

SCALE_BATCHES = 4
"""The number of calls of a layer on which the scale is chosen."""


def require_closed_form(pairs: Iterable[LayerPair]) -> None:
    """Raise `InvalidConfigError` if a layer has no closed form."""
    for learner in (learner for pair in pairs for learner in learners_of(pair)):
        if _has_closed_form(learner):
            continue
        name, teacher = learner.synthesizer.config.variant, type(learner.pair.teacher).__name__
        changes_queries = first_order_parts(learner.synthesizer) and not has_plain_logits(learner.pair.teacher)
        raise InvalidConfigError(
            f"method='average' has no closed form of {name!r} for layer {learner.pair.label!r}: {teacher} rotates, normalises, "
            f"clips or shifts queries and keys before their product. Use random or factorized_random there, or "
            f"method='auto' or 'distill'."
            if changes_queries
            else f"method='average' supports random, factorized_random, dense and factorized_dense, alone or with salience, and "
            f"mixtures with dot_product; layer {learner.pair.label!r} is {name!r}. Use method='auto' or 'distill'."
        )


def has_closed_form(pair: LayerPair) -> bool:
    """Whether all synthesizers of a layer have a closed form."""
    return all(map(_has_closed_form, learners_of(pair)))


def _has_closed_form(learner: Learner) -> bool:
    if has_dot_product(learner.synthesizer):
        return True
    parts = first_order_parts(learner.synthesizer)
    if parts and not has_plain_logits(learner.pair.teacher):
        return False
    return bool(table_parts(learner.synthesizer) or parts)


def write_closed_forms(teacher: PreTrainedModel, pairs: list[LayerPair], batches: Iterable[Batch]) -> None:
    """Write the closed form of each layer, or of each group of its heads.

    Both models must be inside `observing(…, backend="eager")`. Each head chooses the scale of its first-order terms: the
    one with the least divergence from the teacher on the first batches. So the closed form of a head does not depend on
    the other synthesized heads, unless they share a table.

    Raises:
        InvalidConfigError: for batches with padding on the left.
    """
    learners = [learner for pair in pairs for learner in learners_of(pair)]
    for learner in learners:
        restore_dot_product(learner.synthesizer)
    tables = {learner.pair.label for learner in learners if table_parts(learner.synthesizer)}
    first_order = {learner.pair.label for learner in learners if _has_first_order(learner)}
    pairs = [pair for pair in pairs if pair.label in tables | first_order]
    if not pairs:
        return
    weights = {pair.label: MeanWeights(*_size(pair)) for pair in pairs if pair.label in tables}
    states = {pair.label: MeanStates(pair) for pair in pairs if pair.label in first_order}
    scale_calls: dict[str, list[Call]] = {label: [] for label in states}
    for batch in batches:
        observed = observe_calls(teacher, pairs, batch)
        for label, call in ((label, call) for label, calls in observed.items() for call in calls):
            if _is_padded_on_the_left(call):
                raise InvalidConfigError(
                    "A batch is padded on the left, so its columns are not the positions of its tokens. Set "
                    "tokenizer.padding_side = 'right' for the transfer."
                )
            if label in weights:
                weights[label].add(call)
            if label in states:
                states[label].add(call)
                if len(scale_calls[label]) < SCALE_BATCHES:
                    scale_calls[label].append(call)
    for learner in learners:
        label = learner.pair.label
        if _has_first_order(learner):
            statistics = _TeacherStatistics(states[label], weights.get(label), scale_calls[label])
            _write_scaled(_best_scales(learner, statistics), learner, statistics)
        elif table_parts(learner.synthesizer):
            write_mean_weights(learner, weights[label])


def _has_first_order(learner: Learner) -> bool:
    return bool(first_order_parts(learner.synthesizer)) and has_plain_logits(learner.pair.teacher)


@dataclass(frozen=True)
class _TeacherStatistics:
    """What a closed form needs to know of the teacher's layer."""

    states: MeanStates
    weights: MeanWeights | None
    scale_calls: list[Call]


def _write_scaled(scales: list[Scale], learner: Learner, statistics: _TeacherStatistics) -> None:
    mean_salience = write_first_order(learner, statistics.states, scales)
    if statistics.weights is not None and table_parts(learner.synthesizer):
        write_mean_weights(learner, statistics.weights, other_logits=mean_salience)


def _best_scales(learner: Learner, statistics: _TeacherStatistics) -> list[Scale]:
    """For each head, the scale with the least divergence from the teacher. Heads that share a table share a scale."""
    candidates = candidate_scales(learner.synthesizer)
    by_scale = torch.stack([_divergences_at(scale, learner, statistics) for scale in candidates])  # (candidates, h)
    if any(part.config.share_heads for part in table_parts(learner.synthesizer)):
        by_scale = by_scale.mean(1, keepdim=True).expand_as(by_scale)
    return [candidates[number] for number in by_scale.argmin(0).tolist()]


@torch.no_grad()
def _divergences_at(scale: Scale, learner: Learner, statistics: _TeacherStatistics) -> torch.Tensor:
    """The divergence of each head from the teacher if its first-order terms have this scale, (h)."""
    _write_scaled([scale] * len(learner.heads), learner, statistics)
    student = learner.pair.student
    total = torch.stack(
        [divergences(call, synthesized_weights(student, call)) for call in statistics.scale_calls]
    ).sum(0)
    return total[list(learner.heads)].cpu()


def _size(pair: LayerPair) -> tuple[int, int]:
    return pair.student.synthesizer.num_heads, pair.student.synthesizer.max_length


def _is_padded_on_the_left(call: Call) -> bool:
    """Whether some sequence starts with padding, so that columns of the batch are not positions."""
    return bool((~call.rows[:, 0] & call.rows.any(-1)).any())
