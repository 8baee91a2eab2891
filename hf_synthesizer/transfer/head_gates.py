"""A gate for each head: between what the stock layer's head gives, and what a synthesized one in its place would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..layers.projections import find_projection_names
from .observe import LayerPair


class HeadGates:
    """`out[h] = stock[h] + gate[h] · (synthesized[h] − stock[h])` in each layer of a teacher, before heads are mixed.

    A layer without gates is the stock one. With `open_to_gradients` each row of the batch has gates of its own, at 0, which
    `made` holds after a forward pass.
    """

    def __init__(self) -> None:
        self.set: dict[str, torch.Tensor] = {}
        self.open_to_gradients = False
        self.made: dict[str, torch.Tensor] = {}

    def choose(self, heads: Mapping[str, list[int]], num_heads: Mapping[str, int]) -> None:
        """Synthesize these heads of each layer, and no others."""
        self.open_to_gradients = False
        self.set = {}
        for label, chosen in heads.items():
            if chosen:
                gate = torch.zeros(1, num_heads[label])
                gate[:, chosen] = 1.0
                self.set[label] = gate

    def of(self, label: str, like: torch.Tensor) -> torch.Tensor | None:
        """The gates (B or 1, H) of a layer whose heads are (B, L, H, d_v); None if it is stock."""
        if self.open_to_gradients:
            if label not in self.made:  # some models have one layer in many places
                self.made[label] = like.new_zeros(like.shape[0], like.shape[2], requires_grad=True)
            return self.made[label]
        gate = self.set.get(label)
        return None if gate is None else gate.to(like)


@contextmanager
def gated(pairs: list[LayerPair]) -> Iterator[HeadGates]:
    """Inside, the teacher's layers answer as the gates say; then as before. Both models are under `observing`.

    Raises:
        UnsupportedModelError: for layers whose projections are not known by name.
    """
    gates = HeadGates()
    handles = []
    try:
        for pair in pairs:
            if find_projection_names(pair.teacher) is None:
                raise UnsupportedModelError(
                    f"{type(pair.teacher).__name__} names its projections in a way that no layer class knows, so that its heads "
                    f"cannot be told apart. Choose whole layers: suggest_layers."
                )
            handles += _hooks(pair, gates)
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def _hooks(pair: LayerPair, gates: HeadGates) -> list[Any]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    heads = pair.student.dimensions[1]

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[:] = [(args, kwargs)]

    def mixed(stock: torch.Tensor) -> torch.Tensor:
        apart = stock.unflatten(-1, (heads, -1))  # (B, L, H, d_v)
        gate = gates.of(pair.label, apart)
        if gate is None:
            return stock
        [(args, kwargs)] = calls
        other = _heads_of(pair.student, args, kwargs).unflatten(-1, (heads, -1))
        return (apart + gate[:, None, :, None] * (other - apart)).flatten(-2)

    def before_output(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (mixed(args[0]), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (mixed(output[0]), *output[1:])

    handles = [pair.teacher.register_forward_pre_hook(remember, with_kwargs=True)]
    projection = _output_of(pair.teacher)
    if projection is None:
        return [*handles, pair.teacher.register_forward_hook(after)]
    return [*handles, projection.register_forward_pre_hook(before_output)]


def _output_of(layer: nn.Module) -> nn.Module | None:
    """The projection that mixes the heads; None where the module around the layer has it."""
    projection_names = find_projection_names(layer) or getattr(layer, "projection_names", None)
    return (
        None
        if projection_names is None or projection_names.output is None
        else cast(nn.Module, layer._modules[projection_names.output])
    )


def _heads_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """All heads of a layer side by side, (B, L, H·d_v), as its output projection gets them."""
    projection = _output_of(layer)
    if projection is None:
        return layer(*args, **kwargs)[0]
    found: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    try:
        layer(*args, **kwargs)
    finally:
        handle.remove()
    return found[0]
