"""Turns the user's request into a configuration for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ..errors import InvalidConfigError, NoMatchingLayerError, did_you_mean
from ..layers.finding.attention_layers import AttentionLayer
from ..models.description import Plan, config_for_layer
from ..synthesizers.config import LayerConfig, SynthesizerConfig
from ..synthesizers.registry import variant_options
from .selection import Layers, depth_of, describe_layers, require_index, select_layers

Variant = str | SynthesizerConfig | Sequence[SynthesizerConfig]
"""The user's request for one layer: a variant, a configuration, or several for groups of its heads."""
Spec = Variant | Mapping[int | str, Variant]


def make_plan(attention_layers: list[AttentionLayer], spec: Spec, layers: Layers, options: dict[str, Any]) -> Plan:
    """The configurations that the arguments of `patch_model` mean, by the layers' labels. `max_length` stays None if it is not named.

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
        unused = [
            key for key in options if key != "max_length" and not any(key in _options_of(v) for v in spec.values())
        ]
        if unused:
            raise InvalidConfigError(
                f"No variant of the hybrid uses {unused[0]}={options[unused[0]]!r}: leave it out."
            )
        return {
            layer.label: _layer_config(
                chosen[layer.label], {k: v for k, v in options.items() if k in _options_of(chosen[layer.label])}, layer
            )
            for layer in attention_layers
            if layer.label in chosen
        }
    return {layer.label: _layer_config(spec, options, layer) for layer in select_layers(attention_layers, layers)}


def _options_of(variant: Variant) -> set[str]:
    groups = _groups(variant)
    if groups is not None:
        return set().union(*map(_options_of, groups))
    name = variant.variant if isinstance(variant, SynthesizerConfig) else variant
    return {*variant_options(name), "max_length", "heads"}  # type: ignore[arg-type]


def _layer_config(variant: Variant, options: dict[str, Any], layer: AttentionLayer) -> LayerConfig:
    groups = _groups(variant)
    if groups is not None:
        configs = [
            _single_config(group, {k: v for k, v in options.items() if k in _options_of(group)}) for group in groups
        ]
        return config_for_layer(configs, layer)
    return config_for_layer(_single_config(variant, options), layer)  # type: ignore[arg-type]


def _single_config(variant: str | SynthesizerConfig, options: dict[str, Any]) -> SynthesizerConfig:
    if isinstance(variant, SynthesizerConfig):
        return variant.replace(**options)
    return SynthesizerConfig(variant, **options)


def _groups(variant: Variant) -> Sequence[SynthesizerConfig] | None:
    """The groups of heads in a request; None if it has none.

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
    stacks = {layer.stack for layer in attention_layers}
    known = {layer.label for layer in attention_layers} | stacks
    for key in spec:
        if isinstance(key, Integral) and not isinstance(key, bool):
            require_index(attention_layers, int(key))
        elif key not in known:
            raise NoMatchingLayerError(
                f"No layer {key!r} in this model. A key is an index, a stack ({', '.join(sorted(stacks))}) or "
                f"'stack.index'; the layers are {describe_layers(attention_layers)}.{did_you_mean(key, known)}"
            )
    chosen = {}
    for layer in attention_layers:
        count = depth_of(attention_layers, layer.stack)
        if layer.index in spec and layer.index - count in spec:
            raise InvalidConfigError(
                f"The hybrid names layer {layer.index} twice: {layer.index} → {spec[layer.index]!r}, and {layer.index - count}, "
                f"counted from the end of {count} layers, → {spec[layer.index - count]!r}. Leave one of them out."
            )
        for key in (layer.label, layer.index, layer.index - count, layer.stack):
            if key in spec:
                chosen[layer.label] = spec[key]
                break
    return chosen
