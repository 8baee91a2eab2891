"""Which attention layers of a model `layers=` selects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

from torch import nn

from ..errors import NoMatchingLayerError, did_you_mean, first_line
from ..layers.finding.attention_layers import AttentionLayer

Layers = Iterable[int] | slice | Callable[[str, nn.Module], bool] | Mapping[str, Any] | None


def select_layers(attention_layers: list[AttentionLayer], layers: Layers) -> list[AttentionLayer]:
    """The attention layers that `layers=` of `patch_model` names.

    Raises:
        NoMatchingLayerError: for a selection that selects nothing, or names a layer that the model does not have.
    """
    if layers is None:
        selected = attention_layers
    elif isinstance(layers, Mapping):
        stacks = {layer.stack for layer in attention_layers}
        for stack in layers:
            if stack not in stacks:
                raise NoMatchingLayerError(
                    f"No stack {stack!r} in this model, which has {', '.join(sorted(stacks))}.{did_you_mean(stack, stacks)}"
                )
        selected = []
        for stack, inner in layers.items():
            of_stack = [layer for layer in attention_layers if layer.stack == stack]
            if inner is not False and inner is not None:
                selected += select_layers(of_stack, None if inner is True else inner)
    elif callable(layers):
        selected = [layer for layer in attention_layers if _is_chosen(layer, layers)]
    elif isinstance(layers, slice):
        try:
            selected = [
                layer
                for layer in attention_layers
                if layer.index in range(*layers.indices(depth_of(attention_layers, layer.stack)))
            ]
        except (TypeError, ValueError) as error:
            raise NoMatchingLayerError(
                f"layers={layers!r} is no slice of layers ({error}). Give whole numbers, and a step other than 0: slice(0, 6, 2)."
            ) from error
    else:
        wanted = _indices(layers, attention_layers)
        selected = [
            layer
            for layer in attention_layers
            if {layer.index, layer.index - depth_of(attention_layers, layer.stack)} & wanted
        ]
    if not selected:
        raise NoMatchingLayerError(
            f"The selection layers={layers!r} matches no self-attention layer. The model has {describe_layers(attention_layers)}."
        )
    return selected


def _is_chosen(layer: AttentionLayer, predicate: Callable[[str, nn.Module], bool]) -> bool:
    try:
        return bool(predicate(layer.name, layer.module))
    except Exception as error:  # whatever a user's function raises
        raise NoMatchingLayerError(
            f"The function layers= failed on layer {layer.name!r}: {type(error).__name__}: {first_line(error)}. It is called as "
            f"layers(name, module), and returns True or False."
        ) from error


def _indices(layers: Any, attention_layers: list[AttentionLayer]) -> set[int]:
    """Each index is checked before the next is taken: an iterable may have more of them than memory holds."""
    items = [layers] if isinstance(layers, (Integral, str)) or not isinstance(layers, Iterable) else layers
    indices = set()
    for index in items:
        if not isinstance(index, Integral) or isinstance(index, bool):
            raise NoMatchingLayerError(
                f"layers= takes indices, a slice, a function (name, module) -> bool, or a dict of stacks; not {index!r}."
            )
        require_index(attention_layers, int(index))
        indices.add(int(index))
    return indices


def depth_of(attention_layers: list[AttentionLayer], stack: str) -> int:
    """How many attention layers a stack has."""
    return sum(layer.stack == stack for layer in attention_layers)


def require_index(attention_layers: list[AttentionLayer], index: int) -> None:
    """Raise `NoMatchingLayerError` for an index that no stack has."""
    depth = max((depth_of(attention_layers, layer.stack) for layer in attention_layers), default=0)
    if not -depth <= index < depth:
        raise NoMatchingLayerError(f"No layer {index} in this model, which has {describe_layers(attention_layers)}.")


def describe_layers(attention_layers: list[AttentionLayer]) -> str:
    """`encoder layers 0 to 11, decoder layers 0 to 5`."""
    stacks = dict.fromkeys(layer.stack for layer in attention_layers)
    if not stacks:
        return "no self-attention layers"
    return ", ".join(f"{stack} layers 0 to {depth_of(attention_layers, stack) - 1}" for stack in stacks)
