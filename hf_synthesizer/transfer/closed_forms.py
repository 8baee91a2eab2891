"""Step 1 of a transfer: what a synthesizer can be given in one pass over some text, without any gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..errors import InvalidConfigError
from .average import MeanWeights, keeps_dot_product, restore_dot_product, tables_of, write_mean_weights
from .distill import divergences
from .first_order import MeanStates, Scale, compares_plainly, first_order_parts, scales_for, write_first_order
from .observe import Batch, Call, LayerPair, Learner, learners_of, observe_calls, synthesized_weights

JUDGED = 4
"""On how many batches the scale is chosen."""


def require_closed_form(pairs: Iterable[LayerPair]) -> None:
    """Raise `InvalidConfigError` when some layer has no closed form."""
    for learner in (learner for pair in pairs for learner in learners_of(pair)):
        if _known(learner):
            continue
        name, teacher = learner.synthesizer.config.variant, type(learner.pair.teacher).__name__
        rotated = first_order_parts(learner.synthesizer) and not compares_plainly(learner.pair.teacher)
        raise InvalidConfigError(
            f"method='average' has no closed form of {name!r} for layer {learner.pair.label!r}: {teacher} rotates, normalises, "
            f"clips or shifts its queries and keys before it compares them. Use random or factorized_random there, or "
            f"method='auto' or 'distill'."
            if rotated
            else f"method='average' knows random, factorized_random, dense and factorized_dense, alone or with salience, and "
            f"mixtures with dot_product; layer {learner.pair.label!r} is {name!r}. Use method='auto' or 'distill'."
        )


def has_closed_form(pair: LayerPair) -> bool:
    """Whether a layer has a closed form, whatever its heads are made of."""
    return all(map(_known, learners_of(pair)))


def _known(learner: Learner) -> bool:
    if keeps_dot_product(learner.synthesizer):
        return True
    parts = first_order_parts(learner.synthesizer)
    if parts and not compares_plainly(learner.pair.teacher):
        return False
    return bool(tables_of(learner.synthesizer) or parts)


def write_closed_forms(teacher: PreTrainedModel, pairs: list[LayerPair], batches: Iterable[Batch]) -> None:
    """Give each layer, or each group of its heads, what has a closed form. Both models are under
    `observing(…, backend="eager")`.

    First-order terms of a head get the scale at which it diverges least from the teacher on the first batches. So a head's
    closed form does not depend on which others are synthesized, unless they share a table.

    Raises:
        InvalidConfigError: for batches that are padded on the left.
    """
    learners = [learner for pair in pairs for learner in learners_of(pair)]
    for learner in learners:
        restore_dot_product(learner.synthesizer)
    tables = {learner.pair.label for learner in learners if tables_of(learner.synthesizer)}
    first_order = {learner.pair.label for learner in learners if _has_first_order(learner)}
    pairs = [pair for pair in pairs if pair.label in tables | first_order]
    if not pairs:
        return
    weights = {pair.label: MeanWeights(*_size(pair)) for pair in pairs if pair.label in tables}
    states = {pair.label: MeanStates(pair) for pair in pairs if pair.label in first_order}
    judged_on: dict[str, list[Call]] = {label: [] for label in states}
    for batch in batches:
        found = observe_calls(teacher, pairs, batch)
        for label, call in ((label, call) for label, calls in found.items() for call in calls):
            if _is_padded_on_the_left(call):
                raise InvalidConfigError(
                    "A batch is padded on the left, so that the columns of the batch are not the positions of the tokens. Set "
                    "tokenizer.padding_side = 'right' for the transfer."
                )
            if label in weights:
                weights[label].add(call)
            if label in states:
                states[label].add(call)
                if len(judged_on[label]) < JUDGED:
                    judged_on[label].append(call)
    for learner in learners:
        label = learner.pair.label
        if _has_first_order(learner):
            seen = _Seen(states[label], weights.get(label), judged_on[label])
            _write(_best_scales(learner, seen), learner, seen)
        elif tables_of(learner.synthesizer):
            write_mean_weights(learner, weights[label])


def _has_first_order(learner: Learner) -> bool:
    return bool(first_order_parts(learner.synthesizer)) and compares_plainly(learner.pair.teacher)


@dataclass(frozen=True)
class _Seen:
    """What was seen of a layer's teacher."""

    states: MeanStates
    weights: MeanWeights | None
    judged_on: list[Call]


def _write(scales: list[Scale], learner: Learner, seen: _Seen) -> None:
    said = write_first_order(learner, seen.states, scales)
    if seen.weights is not None and tables_of(learner.synthesizer):
        write_mean_weights(learner, seen.weights, less=said)


def _best_scales(learner: Learner, seen: _Seen) -> list[Scale]:
    """For each head the scale at which it is nearest to its teacher; one for all heads of a group that share a table."""
    candidates = scales_for(learner.synthesizer)
    apart = torch.stack([_divergences_at(scale, learner, seen) for scale in candidates])  # (candidates, h)
    if any(part.config.share_heads for part in tables_of(learner.synthesizer)):
        apart = apart.mean(1, keepdim=True).expand_as(apart)
    return [candidates[number] for number in apart.argmin(0).tolist()]


@torch.no_grad()
def _divergences_at(scale: Scale, learner: Learner, seen: _Seen) -> torch.Tensor:
    """How far each head is from its teacher when its first-order terms have the scale, (h)."""
    _write([scale] * len(learner.heads), learner, seen)
    student = learner.pair.student
    apart = torch.stack([divergences(call, synthesized_weights(student, call)) for call in seen.judged_on]).sum(0)
    return apart[list(learner.heads)].cpu()


def _size(pair: LayerPair) -> tuple[int, int]:
    return pair.student.synthesizer.num_heads, pair.student.synthesizer.max_length


def _is_padded_on_the_left(call: Call) -> bool:
    """Whether some sequence starts with padding, so that columns of the batch are not positions."""
    return bool((~call.rows[:, 0] & call.rows.any(-1)).any())
