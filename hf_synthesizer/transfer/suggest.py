"""`suggest_layers`: which layers can be synthesized at the least cost."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import SynthesizerConfig
from ..errors import AlreadyPatchedError, InvalidConfigError
from ..faces.mixin import SynthesizerMixin
from ..patching.slots import find_slots
from ..patching.swap import patch_model
from .distill import relative_error, states_of
from .observe import Batch, LayerPair, observing, on_device, pair_layers
from .run import transfer_attention

LastStates = tuple[torch.Tensor, torch.Tensor | None]
"""The last hidden states of a stack, and which of their places are tokens."""


class Suggestion(dict[int | str, str | SynthesizerConfig]):
    """A hybrid `{layer: variant}`, ready for `patch_model(model, suggestion)`. Prints as a table.

    `costs` says for every layer, by its label such as "encoder.3", what the swap of it alone does to the last hidden
    states (squared error relative to their variance), and `total` what all suggested swaps together do, in the order in
    which they were chosen. The costs are those after a short training of the logits alone: an order, not a forecast.
    """

    def __init__(
        self, hybrid: dict[int | str, str | SynthesizerConfig], costs: dict[str, float], total: dict[str, float]
    ):
        super().__init__(hybrid)
        self.costs = costs
        self.total = total

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what `from_dict` takes, and the command `patch --plan`."""
        hybrid = {
            str(layer): variant.to_dict() if isinstance(variant, SynthesizerConfig) else variant
            for layer, variant in self.items()
        }
        return {"hybrid": hybrid, "costs": self.costs, "total": self.total}

    @classmethod
    def from_dict(cls, data: Any) -> Suggestion:
        """The inverse of `to_dict`; the measured costs may be missing.

        Raises:
            InvalidConfigError: for data that names no layers.
        """
        hybrid = data.get("hybrid") if isinstance(data, Mapping) else None
        if not isinstance(hybrid, Mapping) or not hybrid:
            raise InvalidConfigError(
                'A plan is a dict such as {"hybrid": {"0": "random", "1": {"variant": "factorized_random", "rank": 4}}}, as '
                "suggest_layers writes it; found " + repr(data)[:200] + "."
            )
        return cls(
            {
                int(layer) if layer.lstrip("-").isdigit() else layer: SynthesizerConfig.from_dict(variant)
                if isinstance(variant, Mapping)
                else variant
                for layer, variant in hybrid.items()
            },
            data.get("costs", {}),
            data.get("total", {}),
        )

    def __str__(self) -> str:
        lines = [f"{'layer':14}{'swapped alone':>15}{'with the earlier':>18}  suggestion"]
        lines.append("-" * len(lines[0]))
        order = sorted(self.costs, key=lambda label: self.total.get(label, math.inf))
        for label in order:
            together = f"{self.total[label]:.4f}" if label in self.total else ""
            verdict = "synthesize" if label in self.total else "leave stock"
            lines.append(f"{label:14}{self.costs[label]:>15.4f}{together:>18}  {verdict}")
        return "\n".join(lines)


def suggest_layers(
    teacher: PreTrainedModel,
    dataloader: Iterable[Batch],
    variant: str | SynthesizerConfig,
    budget: float | int = 0.5,
    *,
    steps: int = 150,
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
        progress: whether a progress bar is shown.
        **options: as for `patch_model`, such as `max_length`.

    Raises:
        AlreadyPatchedError: for a teacher that is no stock model.
        InvalidConfigError: for a budget out of range.
    """
    if any(isinstance(module, SynthesizerMixin) for module in teacher.modules()):
        raise AlreadyPatchedError("suggest_layers measures swaps in a stock model; this one is patched already.")
    slots, _ = find_slots(teacher)
    count = _layers_in(budget, len(slots))
    student = patch_model(copy.deepcopy(teacher), variant, **options)
    transfer_attention(student, teacher, dataloader, steps=(steps, 0), autocast=autocast, progress=progress)
    pairs = pair_layers(student, teacher)
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
    one_stack = len({slot.stack for slot in slots}) == 1
    keys = {slot.label: slot.index if one_stack else slot.label for slot in slots}
    return Suggestion({keys[label]: variant for label in sorted(total, key=list(keys).index)}, costs, total)


def _layers_in(budget: float | int, layers: int) -> int:
    number = isinstance(budget, int) and not isinstance(budget, bool)
    count = budget if number else math.ceil(budget * layers - 1e-9)
    if isinstance(budget, bool) or not 1 <= count <= layers:
        raise InvalidConfigError(
            f"budget must be a share of the layers in (0, 1] or a number of layers from 1 to {layers}, not {budget!r}."
        )
    return int(count)


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
