"""A gate for each head, between the output of the stock head and that of a synthesized head, and what it measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..layers.finding.projections import find_projection_names
from .distill import answers_of
from .observe import Batch, LayerPair

MAX_DIRECTIONS = 8
"""The largest number of directions in which derivatives of the answers are taken."""


class HeadGates:
    """`out[h] = stock[h] + gate[h] · (synthesized[h] − stock[h])` in each layer of a teacher, before the output projection.

    A layer without gates is stock. With `with_gradients`, each row of the batch has gates of its own with the value 0;
    `gradient_gates` holds them after a forward pass.
    """

    def __init__(self) -> None:
        self.fixed_gates: dict[str, torch.Tensor] = {}
        self.with_gradients = False
        self.gradient_gates: dict[str, torch.Tensor] = {}

    def choose(self, heads: Mapping[str, list[int]], num_heads: Mapping[str, int]) -> None:
        """Synthesize these heads of each layer, and no others."""
        self.with_gradients = False
        self.fixed_gates = {
            label: torch.tensor([[float(head in chosen) for head in range(num_heads[label])]])
            for label, chosen in heads.items()
            if chosen
        }

    def gates_of(self, label: str, like: torch.Tensor) -> torch.Tensor | None:
        """The gates (B or 1, H) of a layer whose heads are (B, L, H, d_v). None if the layer is stock."""
        if self.with_gradients:
            if label not in self.gradient_gates:  # some models use one layer several times
                self.gradient_gates[label] = like.new_zeros(like.shape[0], like.shape[2], requires_grad=True)
            return self.gradient_gates[label]
        gate = self.fixed_gates.get(label)
        return None if gate is None else gate.to(like)


@contextmanager
def gated(pairs: list[LayerPair]) -> Iterator[HeadGates]:
    """Inside the context, the gates mix stock and synthesized heads in the teacher's layers. Use it inside `observing`.

    Raises:
        UnsupportedModelError: for layers whose projections have unknown names.
    """
    gates = HeadGates()
    handles = []
    try:
        for pair in pairs:
            if find_projection_names(pair.teacher) is None:
                raise UnsupportedModelError(
                    f"{type(pair.teacher).__name__} has projections with unknown names, so its heads cannot be told apart. "
                    f"Choose whole layers: suggest_layers."
                )
            handles += _register_hooks(pair, gates)
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def _register_hooks(pair: LayerPair, gates: HeadGates) -> list[Any]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    heads = pair.student.dimensions[1]

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[:] = [(args, kwargs)]

    def mix(stock: torch.Tensor) -> torch.Tensor:
        stock_heads = stock.unflatten(-1, (heads, -1))  # (B, L, H, d_v)
        gate = gates.gates_of(pair.label, stock_heads)
        if gate is None:
            return stock
        [(args, kwargs)] = calls
        synthesized_heads = _heads_before_output(pair.student, args, kwargs).unflatten(-1, (heads, -1))
        return (stock_heads + gate[:, None, :, None] * (synthesized_heads - stock_heads)).flatten(-2)

    def mix_before_projection(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (mix(args[0]), *args[1:])

    def mix_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (mix(output[0]), *output[1:])

    handles = [pair.teacher.register_forward_pre_hook(remember, with_kwargs=True)]
    projection = _output_projection(pair.teacher)
    if projection is None:
        return [*handles, pair.teacher.register_forward_hook(mix_output)]
    return [*handles, projection.register_forward_pre_hook(mix_before_projection)]


def _output_projection(layer: nn.Module) -> nn.Module | None:
    """The output projection of an attention layer. None if the module around the layer holds it (BERT)."""
    names = find_projection_names(layer) or getattr(layer, "projection_names", None)
    return None if names is None or names.output is None else layer.get_submodule(names.output)


def _heads_before_output(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """All heads of a layer side by side, (B, L, H·d_v): the input of the output projection."""
    projection = _output_projection(layer)
    if projection is None:
        return layer(*args, **kwargs)[0]
    projection_inputs: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: projection_inputs.append(args[0]))
    try:
        layer(*args, **kwargs)
    finally:
        handle.remove()
    return projection_inputs[0]


def head_costs(
    teacher: PreTrainedModel, gates: HeadGates, measured: list[Batch], heads: dict[str, int], trained_head: bool = True
) -> dict[str, list[float]]:
    """For each head, the mean square of the derivative of a row's answers by its gate, relative to the answers' mean square."""
    sums = {label: torch.zeros(count, dtype=torch.float64) for label, count in heads.items()}
    power = 0.0
    for batch in measured:
        gates.fixed_gates, gates.with_gradients, gates.gradient_gates = {}, True, {}
        answers = answers_of(teacher, batch, trained_head)
        power += float(answers.detach().double().square().sum())
        gradient_gates = dict(gates.gradient_gates)
        for direction, share in _directions(answers):
            slopes = torch.autograd.grad(
                (answers * direction).sum(), list(gradient_gates.values()), retain_graph=True, allow_unused=True
            )
            for label, slope in zip(gradient_gates, slopes, strict=True):
                if slope is not None:
                    sums[label] += share * slope.detach().double().square().sum(0).cpu()
    gates.with_gradients, gates.gradient_gates = False, {}
    return {label: (total / max(power, torch.finfo(torch.float32).tiny)).tolist() for label, total in sums.items()}


def _directions(answers: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield directions in the space of a row's answers and their weights, so that Σ weight · (direction · x)² = |x|².

    Few answers give one direction for each number. Many answers give random signs, for which the sum is |x|² on average.
    """
    numbers = answers[0].numel()
    if numbers <= MAX_DIRECTIONS:
        for number in range(numbers):
            direction = torch.zeros_like(answers).flatten(1)
            direction[:, number] = 1
            yield direction.view_as(answers), 1.0
        return
    generator = torch.Generator().manual_seed(0)
    for _ in range(MAX_DIRECTIONS):
        signs = torch.randint(2, answers.shape, generator=generator).mul(2).sub(1)
        yield signs.to(answers), 1 / MAX_DIRECTIONS


@torch.no_grad()
def change_of_answers(
    teacher: PreTrainedModel,
    gates: HeadGates | Sequence[HeadGates],
    measured: list[Batch],
    chosen: Any,
    heads: dict[str, int],
    trained_head: bool = True,
) -> float:
    """`Σ |answers with these heads synthesized − stock answers|² / Σ |stock answers|²`.

    With the gates of several kinds of heads, `chosen` has the heads of each layer for each of them.
    """
    kinds = [(gates, chosen)] if isinstance(gates, HeadGates) else list(zip(gates, chosen, strict=True))

    def choose(synthesized: bool) -> None:
        for gates_of_kind, heads_of_kind in kinds:
            gates_of_kind.choose(heads_of_kind if synthesized else {}, heads)

    change = power = 0.0
    for batch in measured:
        choose(False)
        stock = answers_of(teacher, batch, trained_head).double()
        choose(True)
        change += float((answers_of(teacher, batch, trained_head).double() - stock).square().sum())
        power += float(stock.square().sum())
    choose(False)
    return change / max(power, torch.finfo(torch.float32).tiny)
