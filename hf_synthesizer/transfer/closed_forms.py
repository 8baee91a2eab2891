"""Step 1 of a transfer: parameters in closed form, from one pass over some batches without gradients.

Each variant names a statistic of the teacher, and computes its parameters from it (`Synthesizer.fit`). This file measures
the statistics, and chooses the scale of first-order terms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import InvalidConfigError
from ..layers.finding.layer_classes import is_understood
from ..layers.finding.projections import projection_of
from ..layers.finding.stock_code import code_of
from ..synthesizers import Synthesizer, list_variants
from ..synthesizers.distance_statistics import DistanceSums
from ..synthesizers.registry import get_variant
from ..synthesizers.relative import DistanceSynthesizer
from ..synthesizers.statistics import Fit, Statistic, TeacherLayer
from .distill import divergences
from .observe import Batch, Call, LayerPair, Learner, learners_of, observe_calls, synthesized_weights

MATCH_BATCHES, MATCH_STEPS = 8, 10
"""The number of calls of a layer on which logits by distance are matched to the teacher's weights, and of steps."""
SCALE_BATCHES = 4
"""The number of calls of a layer on which the scale is chosen."""
SCALES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""The candidates for the scale of first-order terms. The larger the term that no synthesizer can express, the smaller the best
scale."""
NOT_PLAIN = re.compile(r"rotary|rope|norm$|softcap|clip_qkv|^position_embeddings$")
"""Names in the code of a stock forward whose logits are not plain products of two projections: rotations, norms of queries
and keys, soft caps, and positions that are added before the projections."""


def has_plain_logits(stock: nn.Module) -> bool:
    """Whether the logits of a stock attention module are `s · q_i · k_j`, with or without a position bias.

    The names in its code tell, as for layer classes. False if no layer class understands the forward.
    """
    if not is_understood(stock):
        return False
    names = (name for code in code_of(type(stock)) for name in (*code.co_names, *code.co_varnames))
    return not any(NOT_PLAIN.search(name) for name in names)


def has_rotated_logits(stock: nn.Module) -> bool:
    """Whether the logits of a stock attention module are plain products of queries and keys that are rotated as Llama does."""
    code = code_of(type(stock))
    names = {name for each in code for name in (*each.co_names, *each.co_varnames)}
    rotation = {"apply_rotary_pos_emb", "position_embeddings"}
    return {name for name in names if NOT_PLAIN.search(name)} == rotation


def parts_with_closed_form(synthesizer: Synthesizer) -> list[Synthesizer]:
    """The parts that take a closed form, in the order in which they are written.

    Beside `dot_product` there are none: it computes the teacher's weights already. First-order terms come first. A part takes
    the queries' term only if no other part competes with it. One more part takes what is left of the mean weights.
    """
    parts = [part for _, part in synthesizer.components()]
    if any(part.is_stock for part in parts):
        return []
    is_alone = sum(not part.key_side for part in parts) == 1
    parts = [part for part in parts if part.statistic is not None and part.can_fit]
    first_order = [part for part in parts if part.is_first_order and (part.key_side or is_alone)]
    return [*first_order, *[part for part in parts if not part.is_first_order][:1]]


def _written_parts(learner: Learner) -> list[Synthesizer]:
    """The same, without first-order terms if the teacher's logits are no plain dot products."""
    parts = parts_with_closed_form(learner.synthesizer)
    if not any(part.is_first_order for part in parts) or has_plain_logits(learner.pair.teacher):
        return parts
    rotated = has_rotated_logits(learner.pair.teacher)
    return [part for part in parts if not part.is_first_order or (rotated and part.statistic.knows_rotations)]  # type: ignore[union-attr]


def has_closed_form(pair: LayerPair) -> bool:
    """Whether all synthesizers of a layer have a closed form."""
    return all(map(_has_closed_form, learners_of(pair)))


def _has_closed_form(learner: Learner) -> bool:
    """Whether all terms of a synthesizer that have a closed form have one for this teacher, and there are some."""
    if any(part.is_stock for _, part in learner.synthesizer.components()):
        return True
    parts = _written_parts(learner)
    return bool(parts) and parts == parts_with_closed_form(learner.synthesizer)


def fitted_rate(learner: Learner) -> float:
    """The factor of the learning rate after the closed form."""
    return min((part.fitted_rate for part in _written_parts(learner)), default=1.0)


def require_closed_form(pairs: Iterable[LayerPair]) -> None:
    """Raise `InvalidConfigError` if a layer has no closed form."""
    for learner in (learner for pair in pairs for learner in learners_of(pair)):
        if _has_closed_form(learner):
            continue
        name, teacher = learner.synthesizer.config.variant, type(learner.pair.teacher).__name__
        variants = [variant for variant in list_variants() if get_variant(variant).statistic]
        tables = [
            name for name in variants if not cast(type[Statistic], get_variant(name).statistic).needs_dot_products
        ]
        raise InvalidConfigError(
            f"method='average' has no closed form of {name!r} for layer {learner.pair.label!r}: {teacher} rotates, normalises, "
            f"clips or shifts queries and keys before their product. Use {' or '.join(tables)} there, or "
            f"method='auto' or 'distill'."
            if parts_with_closed_form(learner.synthesizer)
            else f"method='average' supports {', '.join(variants)}, and mixtures with dot_product; layer "
            f"{learner.pair.label!r} is {name!r}. Use method='auto' or 'distill'."
        )


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
        learner.synthesizer.start_as_stock()
    statistics: dict[
        tuple[str, int, type[Statistic], str], Statistic
    ] = {}  # groups of heads share those of their layer
    forms = []
    for learner in learners:
        form = _ClosedForm(learner, {})
        for part in _written_parts(learner):
            cls = cast(type[Statistic], part.statistic)
            key = (learner.pair.label, part.max_length, cls, str(part.config.options))
            if key not in statistics:
                statistics[key] = cls(teacher_layer(learner.pair, part))
            form.statistics[part] = statistics[key]
        forms += [form] if form.statistics else []
    labels = {label for label, *_ in statistics}
    pairs = [pair for pair in pairs if pair.label in labels]
    for batch in batches if pairs else ():
        for label, calls in observe_calls(teacher, pairs, batch).items():
            for call in calls:
                if _is_padded_on_the_left(call):
                    raise InvalidConfigError(
                        "A batch is padded on the left, so its columns are not the positions of its tokens. Set "
                        "tokenizer.padding_side = 'right' for the transfer."
                    )
                for (statistic_label, *_), statistic in statistics.items():
                    if statistic_label == label:
                        statistic.add(call)
                for form in forms:
                    if form.learner.pair.label == label:
                        form.keep(call)
    for form in forms:
        form.write(form.best_scales())
    for pair in pairs:
        match_distances([form for form in forms if form.learner.pair is pair and form.by_distance])


def match_distances(forms: list[_ClosedForm]) -> None:
    """Give logits by distance the weights that the teacher has at each distance, in a few steps of iterative scaling.

    `forms` are those of one layer. The student's other logits, such as salience, take part.
    """
    for step in range(MATCH_STEPS if forms else 0):
        student = forms[0].learner.pair.student
        totals: dict[_ClosedForm, DistanceSums] = {}
        for call in forms[0].match_calls:
            weights = synthesized_weights(student, call)
            for form in forms:
                sums = form.distance_sums(weights, call.pairs)
                totals[form] = sums if form not in totals else totals[form].plus(sums)
        for form, found in totals.items():
            part = form.by_distance[0]
            part.match(form.wanted[0], found, form.learner.synthesizer.alpha().get(part.variant), step % 2 == 1)


Scale = tuple[float, float]
"""The scale of a head's first-order terms, and one of the constants of its part (`Synthesizer.constants`)."""


@dataclass(frozen=True, eq=False)
class _ClosedForm:
    """The closed form of one learner: its parts with their statistics, and calls on which the scale is chosen."""

    learner: Learner
    statistics: dict[Synthesizer, Statistic]
    scale_calls: list[Call] = field(default_factory=list)
    match_calls: list[Call] = field(default_factory=list)
    """Calls without their weights, on which the weights at each distance are compared."""
    wanted: list[DistanceSums] = field(default_factory=list)
    """The teacher's weights at each distance in these calls, as one item."""

    @property
    def by_distance(self) -> list[DistanceSynthesizer]:
        """The part with logits by distance, if there is one."""
        return [part for part in self.statistics if isinstance(part, DistanceSynthesizer)]

    def keep(self, call: Call) -> None:
        """Keep a call, if calls are needed again."""
        if self.first_order and len(self.scale_calls) < SCALE_BATCHES:
            self.scale_calls.append(call)
        if self.by_distance and len(self.match_calls) < MATCH_BATCHES:
            sums = self.distance_sums(self.within_reach(call), call.pairs)
            self.wanted[:] = [sums if not self.wanted else self.wanted[0].plus(sums)]
            self.match_calls.append(replace(call, weights=call.weights[..., :0]))

    def within_reach(self, call: Call) -> torch.Tensor:
        """The teacher's weights (B, H, L, L) on the keys that the learner sees through its window, if it has one."""
        if self.learner.synthesizer.config.window is None:
            return call.weights
        heads = list(self.learner.heads)
        weights = call.weights.float()
        seen = synthesized_weights(self.learner.pair.student, call)[:, heads] > 0
        near = weights[:, heads] * seen.to(weights.device)
        return weights.index_copy(
            1, torch.tensor(heads, device=weights.device), near / near.sum(-1, True).clamp(min=1e-20)
        )

    def distance_sums(self, weights: torch.Tensor, pairs: torch.Tensor) -> DistanceSums:
        """The sums of the learner's heads, of all weights (B, H, L, L) of the layer."""
        config = self.by_distance[0].config
        return DistanceSums.of(weights[:, list(self.learner.heads)], pairs, config.max_distance, config.sinks)

    @property
    def first_order(self) -> list[Synthesizer]:
        """The parts with first-order terms."""
        return [part for part in self.statistics if part.is_first_order]

    @torch.no_grad()
    def write(self, scales: list[Scale]) -> None:
        """Write all parts, with one scale for each head."""
        terms, constants = torch.tensor(scales, dtype=torch.float64).unbind(-1)  # (h) each
        alpha = self.learner.synthesizer.alpha()
        other_logits: torch.Tensor | None = None
        for part, statistic in self.statistics.items():
            mean_logits = part.fit(
                Fit(
                    statistic,
                    self.learner.heads,
                    terms.unsqueeze(-1),
                    constants,
                    alpha.get(part.variant),
                    other_logits,
                    beside_keys=any(other.key_side and other is not part for other in self.first_order),
                )
            )
            if mean_logits is not None:
                other_logits = mean_logits if other_logits is None else other_logits + mean_logits

    def best_scales(self) -> list[Scale]:
        """For each head, the scale with the least divergence from the teacher. Heads that share a table share a scale."""
        if not self.first_order:
            return [(1.0, 1.0)] * len(self.learner.heads)
        constants = max((part.constants for part in self.first_order), key=len)
        candidates = list(itertools.product(SCALES, constants))
        by_scale = torch.stack([self.divergences_at(scale) for scale in candidates])  # (candidates, h)
        if any(part.table_heads < part.num_heads for part in self.statistics if not part.is_first_order):
            by_scale = by_scale.mean(1, keepdim=True).expand_as(by_scale)
        return [candidates[number] for number in by_scale.argmin(0).tolist()]

    @torch.no_grad()
    def divergences_at(self, scale: Scale) -> torch.Tensor:
        """The divergence of each head from the teacher if its first-order terms have this scale, (h)."""
        self.write([scale] * len(self.learner.heads))
        student = self.learner.pair.student
        total = torch.stack([divergences(call, synthesized_weights(student, call)) for call in self.scale_calls]).sum(
            0
        )
        return total[list(self.learner.heads)].cpu()


def teacher_layer(pair: LayerPair, part: Synthesizer) -> TeacherLayer:
    """What the statistic of a part needs to know of the teacher's layer."""
    projections = None
    if part.is_first_order:
        names = pair.student.projection_names
        query, key = (cast(nn.Linear, projection_of(pair.teacher, names, name)) for name in ("query", "key"))
        projections = (query, key)
    return TeacherLayer(
        *pair.student.dimensions, part.max_length, projections, pair.student.logit_scaling, part.config.options
    )


def _is_padded_on_the_left(call: Call) -> bool:
    """Whether some sequence starts with padding, so that columns of the batch are not positions."""
    return bool((~call.rows[:, 0] & call.rows.any(-1)).any())
