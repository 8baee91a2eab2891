"""Step 1 of a transfer: what a synthesizer can be given in one pass over some text, without any gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from ..errors import InvalidConfigError
from .average import MeanWeights, keeps_dot_product, restore_dot_product, tables_of, write_mean_weights
from .distill import divergence
from .first_order import SCALES, MeanStates, compares_plainly, first_order_parts, write_first_order
from .observe import Batch, Call, LayerPair, observe_calls, synthesized_weights

JUDGED = 4
"""On how many batches the scale is chosen."""


def require_closed_form(pairs: Iterable[LayerPair]) -> None:
    """Raise `InvalidConfigError` when some layer has no closed form."""
    for pair in pairs:
        if not _has_closed_form(pair):
            rotated = first_order_parts(pair.student) and not compares_plainly(pair.teacher)
            raise InvalidConfigError(
                f"method='average' has no closed form of {pair.student.synthesizer.config.variant!r} for layer {pair.label!r}: "
                f"{type(pair.teacher).__name__} rotates, normalises, clips or shifts its queries and keys before it compares "
                f"them. Use random or factorized_random there, or method='auto' or 'distill'."
                if rotated
                else f"method='average' knows random, factorized_random and dense, alone or with salience, and mixtures with "
                f"dot_product; layer {pair.label!r} is {pair.student.synthesizer.config.variant!r}. Use method='auto' or "
                f"'distill'."
            )


def _has_closed_form(pair: LayerPair) -> bool:
    layer = pair.student
    if keeps_dot_product(layer.synthesizer):
        return True
    parts = first_order_parts(layer)
    if parts and not compares_plainly(pair.teacher):
        return False
    return bool(tables_of(layer) or parts)


def write_closed_forms(teacher: PreTrainedModel, pairs: list[LayerPair], batches: Iterable[Batch]) -> None:
    """Give each layer what has a closed form. Both models are under `observing(…, backend="eager")`.

    First-order terms get the scale, one a layer, that diverges least from the teacher on the first batches.

    Raises:
        InvalidConfigError: for batches that are padded on the left.
    """
    for pair in pairs:
        restore_dot_product(pair.student)
    weights = {pair.label: MeanWeights(*_size(pair)) for pair in pairs if tables_of(pair.student)}
    states = {
        pair.label: MeanStates(pair)
        for pair in pairs
        if first_order_parts(pair.student) and compares_plainly(pair.teacher)
    }
    pairs = [pair for pair in pairs if pair.label in weights or pair.label in states]
    if not pairs:
        return
    judged_on: dict[str, list[Call]] = {label: [] for label in states}
    for batch in batches:
        found = observe_calls(teacher, pairs, batch)
        for label, call in ((label, call) for label, calls in found.items() for call in calls):
            if _is_padded_on_the_left(call):
                raise InvalidConfigError(
                    "A batch is padded on the left, so that no place of it is a position. Set tokenizer.padding_side = "
                    "'right' for the transfer."
                )
            if label in weights:
                weights[label].add(call)
            if label in states:
                states[label].add(call)
                if len(judged_on[label]) < JUDGED:
                    judged_on[label].append(call)
    for pair in pairs:
        if pair.label not in states:
            write_mean_weights(pair.student, weights[pair.label])
            continue
        best = min(SCALES, key=lambda scale: _divergence_at(scale, pair, states, weights, judged_on[pair.label]))
        _write(best, pair, states, weights)


def _write(scale: float, pair: LayerPair, states: dict[str, MeanStates], weights: dict[str, MeanWeights]) -> None:
    said = write_first_order(states[pair.label], scale)
    if pair.label in weights:
        write_mean_weights(pair.student, weights[pair.label], less=said)


@torch.no_grad()
def _divergence_at(
    scale: float,
    pair: LayerPair,
    states: dict[str, MeanStates],
    weights: dict[str, MeanWeights],
    judged_on: list[Call],
) -> float:
    """How far the layer is from its teacher when its first-order terms have the scale."""
    _write(scale, pair, states, weights)
    return sum(divergence(call, synthesized_weights(pair.student, call)).item() for call in judged_on)


def _size(pair: LayerPair) -> tuple[int, int]:
    return pair.student.synthesizer.num_heads, pair.student.synthesizer.max_length


def _is_padded_on_the_left(call: Call) -> bool:
    """Whether some sequence starts with padding, so that slots are not positions."""
    return bool((~call.rows[:, 0] & call.rows.any(-1)).any())
