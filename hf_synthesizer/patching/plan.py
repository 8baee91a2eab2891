"""Which layer gets which synthesizer, from what a user asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from ..errors import InvalidConfigError, NoMatchingLayerError, did_you_mean, first_line
from ..layers.attention_layers import AttentionLayer
from ..models.description import Plan, config_for_layer
from ..synthesizers.config import LayerConfig, SynthesizerConfig
from ..synthesizers.registry import variant_options

MOST_LAYERS = 10_000
"""In one range of a command line: more than any model has, and few enough to be listed."""

Variant = str | SynthesizerConfig | Sequence[SynthesizerConfig]
"""What a layer is asked to be: a variant, a configuration, or several for groups of its heads."""
Spec = Variant | Mapping[int | str, Variant]
Layers = Iterable[int] | slice | Callable[[str, nn.Module], bool] | Mapping[str, Any] | None


def make_plan(attention_layers: list[AttentionLayer], spec: Spec, layers: Layers, options: dict[str, Any]) -> Plan:
    """What `patch_model` was asked for, layer by layer. A `max_length` that nobody named stays None.

    Raises:
        NoMatchingLayerError: for a selection that selects nothing, or names a layer that the model does not have.
        UnknownVariantError, InvalidConfigError: for a variant or an option that cannot be.
    """
    if isinstance(spec, Mapping):
        if layers is not None:
            raise InvalidConfigError(
                "Both a hybrid {layer: variant} and layers= were given. The keys of the hybrid name its layers: leave "
                "layers= out."
            )
        chosen = _hybrid(attention_layers, spec)
        unused = [key for key in options if key != "max_length" and not any(key in _knows(v) for v in spec.values())]
        if unused:
            raise InvalidConfigError(
                f"No variant of the hybrid uses {unused[0]}={options[unused[0]]!r}: leave it out."
            )
        return {
            attention_layer.label: _configure(
                chosen[attention_layer.label],
                {k: v for k, v in options.items() if k in _knows(chosen[attention_layer.label])},
                attention_layer,
            )
            for attention_layer in attention_layers
            if attention_layer.label in chosen
        }
    return {
        attention_layer.label: _configure(spec, options, attention_layer)
        for attention_layer in _select(attention_layers, layers)
    }


def _knows(variant: Variant) -> set[str]:
    groups = _groups(variant)
    if groups is not None:
        return set().union(*map(_knows, groups))
    name = variant.variant if isinstance(variant, SynthesizerConfig) else variant
    return variant_options(name) | {"max_length", "heads"}  # type: ignore[arg-type]


def _configure(variant: Variant, options: dict[str, Any], attention_layer: AttentionLayer) -> LayerConfig:
    groups = _groups(variant)
    if groups is not None:
        own = [_one(group, {k: v for k, v in options.items() if k in _knows(group)}) for group in groups]
        return config_for_layer(own, attention_layer)
    return config_for_layer(_one(variant, options), attention_layer)  # type: ignore[arg-type]


def _one(variant: str | SynthesizerConfig, options: dict[str, Any]) -> SynthesizerConfig:
    if isinstance(variant, SynthesizerConfig):
        return SynthesizerConfig.create(**{**variant.to_dict(), **options})
    return SynthesizerConfig.create(variant, **options)


def _groups(variant: Variant) -> Sequence[SynthesizerConfig] | None:
    """The groups of heads that a layer is asked to have, None if it is asked for none.

    Raises:
        InvalidConfigError: for a list that holds anything but configurations.
    """
    if not isinstance(variant, (list, tuple)):
        return None
    if not variant or not all(isinstance(group, SynthesizerConfig) for group in variant):
        raise InvalidConfigError(
            f"Groups of heads are given as a list of SynthesizerConfig(variant, heads=[…]), at least one; not {variant!r}."
        )
    return variant


def _hybrid(attention_layers: list[AttentionLayer], spec: Mapping[Any, Variant]) -> dict[str, Variant]:
    """Keys are an index, a stack, or "stack.index"; the more precise one wins."""
    if not spec:
        raise NoMatchingLayerError("The hybrid is empty: name at least one layer, as in {0: 'random', 1: 'dense'}.")
    stacks = {attention_layer.stack for attention_layer in attention_layers}
    known = {attention_layer.label for attention_layer in attention_layers} | stacks
    for key in spec:
        if isinstance(key, Integral) and not isinstance(key, bool):
            _require_index(attention_layers, int(key))
        elif key not in known:
            raise NoMatchingLayerError(
                f"No layer {key!r} in this model. A key is an index, a stack ({', '.join(sorted(stacks))}) or "
                f"'stack.index'; the layers are {_describe(attention_layers)}.{did_you_mean(key, known)}"
            )
    chosen = {}
    for attention_layer in attention_layers:
        count = _depth(attention_layers, attention_layer.stack)
        if attention_layer.index in spec and attention_layer.index - count in spec:
            raise InvalidConfigError(
                f"The hybrid names layer {attention_layer.index} twice: {attention_layer.index} → {spec[attention_layer.index]!r}, and {attention_layer.index - count}, "
                f"counted from the end of {count} layers, → {spec[attention_layer.index - count]!r}. Leave one of them out."
            )
        for key in (
            attention_layer.label,
            attention_layer.index,
            attention_layer.index - count,
            attention_layer.stack,
        ):
            if key in spec:
                chosen[attention_layer.label] = spec[key]
                break
    return chosen


def _select(attention_layers: list[AttentionLayer], layers: Layers) -> list[AttentionLayer]:
    if layers is None:
        selected = attention_layers
    elif isinstance(layers, Mapping):
        stacks = {attention_layer.stack for attention_layer in attention_layers}
        for stack in layers:
            if stack not in stacks:
                raise NoMatchingLayerError(
                    f"No stack {stack!r} in this model, which has {', '.join(sorted(stacks))}.{did_you_mean(stack, stacks)}"
                )
        selected = []
        for stack, inner in layers.items():
            own = [attention_layer for attention_layer in attention_layers if attention_layer.stack == stack]
            if inner is not False and inner is not None:
                selected += _select(own, None if inner is True else inner)
    elif callable(layers):
        selected = [attention_layer for attention_layer in attention_layers if _is_chosen(attention_layer, layers)]
    elif isinstance(layers, slice):
        try:
            selected = [
                attention_layer
                for attention_layer in attention_layers
                if attention_layer.index in range(*layers.indices(_depth(attention_layers, attention_layer.stack)))
            ]
        except (TypeError, ValueError) as error:
            raise NoMatchingLayerError(
                f"layers={layers!r} is no slice of layers ({error}). Give whole numbers, and a step other than 0: slice(0, 6, 2)."
            ) from error
    else:
        wanted = _indices(layers, attention_layers)
        selected = [
            attention_layer
            for attention_layer in attention_layers
            if {attention_layer.index, attention_layer.index - _depth(attention_layers, attention_layer.stack)}
            & wanted
        ]
    if not selected:
        raise NoMatchingLayerError(
            f"The selection layers={layers!r} matches no self-attention layer. The model has {_describe(attention_layers)}."
        )
    return selected


def _is_chosen(attention_layer: AttentionLayer, predicate: Callable[[str, nn.Module], bool]) -> bool:
    try:
        return bool(predicate(attention_layer.name, attention_layer.module))
    except Exception as error:  # whatever a user's function raises
        raise NoMatchingLayerError(
            f"The function layers= failed on layer {attention_layer.name!r}: {type(error).__name__}: {first_line(error)}. It is called as "
            f"layers(name, module), and returns True or False."
        ) from error


def _indices(layers: Any, attention_layers: list[AttentionLayer]) -> set[int]:
    """Each index is looked at before the next is asked for: there may be more of them than memory holds."""
    items = [layers] if isinstance(layers, (Integral, str)) or not isinstance(layers, Iterable) else layers
    indices = set()
    for index in items:
        if not isinstance(index, Integral) or isinstance(index, bool):
            raise NoMatchingLayerError(
                f"layers= takes indices, a slice, a function (name, module) -> bool, or a dict of stacks; not {index!r}."
            )
        _require_index(attention_layers, int(index))
        indices.add(int(index))
    return indices


def _depth(attention_layers: list[AttentionLayer], stack: str) -> int:
    return sum(attention_layer.stack == stack for attention_layer in attention_layers)


def _require_index(attention_layers: list[AttentionLayer], index: int) -> None:
    depth = max((_depth(attention_layers, attention_layer.stack) for attention_layer in attention_layers), default=0)
    if not -depth <= index < depth:
        raise NoMatchingLayerError(f"No layer {index} in this model, which has {_describe(attention_layers)}.")


def _describe(attention_layers: list[AttentionLayer]) -> str:
    stacks = dict.fromkeys(attention_layer.stack for attention_layer in attention_layers)
    if not stacks:
        return "no self-attention layers"
    return ", ".join(f"{stack} layers 0 to {_depth(attention_layers, stack) - 1}" for stack in stacks)


def parse_layers(text: str | None) -> list[int] | dict[str, Any] | None:
    """Layers as a command line names them: `"0-3,5"` → `[0, 1, 2, 3, 5]`; `"encoder,decoder.0-1"` →
    `{"encoder": True, "decoder": [0, 1]}`; None → None, all of them.

    Raises:
        InvalidConfigError: for anything else.
    """
    if text is None:
        return None
    indices: list[int] = []
    stacks: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(?:([A-Za-z_]\w*)(?:\.|$))?(?:([0-9]{1,9})(?:-([0-9]{1,9}))?)?", part)
        stack, first, last = match.groups() if match and part else (None, None, None)
        span = int(last or first) - int(first) + 1 if first else 0
        if (stack is None and first is None) or (first and not 1 <= span <= MOST_LAYERS):
            raise InvalidConfigError(
                f"--layers {_shortened(text)}: give indices and ranges such as 0-3,5, of {MOST_LAYERS:,} layers at most, stacks "
                f"such as encoder or decoder.0-3, or 'suggest'."
            )
        numbers = list(range(int(first), int(first) + span)) if first else []
        if stack is None:
            indices += numbers
        elif not numbers or stacks.get(stack) is True:
            stacks[stack] = True
        else:
            stacks[stack] = [*stacks.get(stack, []), *numbers]
    if indices and stacks:
        raise InvalidConfigError(
            f"--layers {_shortened(text)} names some layers with their stack and others without: name it for all."
        )
    return stacks or indices


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"
