"""Layers that were dropped after a patch (`encoder.layer = encoder.layer[:3]`): a checkpoint describes what is there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import SynthesizerError, UnsupportedModelError
from ..layers.finding.attention_layers import AttentionLayer, find_attention_layers
from ..layers.guard import Guard
from ..layers.mixin import SynthesizerMixin
from .description import plan_to_json
from .served import PLACE

COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "num_encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
)
"""What configs call the number of layers of a model or of a stack."""


def describe_what_is_there(model: PreTrainedModel) -> None:
    """Let the config of a patched model describe the layers that it has, and count them, before it is saved.

    Nothing happens to a config whose description is as deep as the model. Else its number of layers follows, and lists with an entry
    for each layer; what comes out is tried on a model without memory.

    Raises:
        UnsupportedModelError: where no number in the config makes a model of these layers; the config is as it was.
    """
    described: dict[str, Any] | None = getattr(model.config, "synthesizer", None)
    if described is None:
        return
    attention_layers, _ = find_attention_layers(model)
    depths = {
        stack: [attention_layer for attention_layer in attention_layers if attention_layer.stack == stack]
        for stack in described["layers"]
    }
    changed = {stack: own for stack, own in depths.items() if own and len(own) != len(described["layers"][stack])}
    if not changed:
        return
    there = [attention_layer for own in changed.values() for attention_layer in own]
    layers = {
        attention_layer.label: attention_layer.module
        for attention_layer in there
        if isinstance(attention_layer.module, SynthesizerMixin)
    }
    plan = {label: _guard(layer).guarded for label, layer in layers.items()}
    served = {label: layer.__dict__["served"] for label, layer in layers.items()}
    description = plan_to_json(plan, there, served, described.get("base_model"), others=described)
    before = {stack: len(described["layers"][stack]) for stack in changed}
    for config in _candidates(model.config, before, changed):
        config.synthesizer = description
        if _builds(model, config):
            model.config.__dict__.update(config.__dict__)
            return
    stack, own = next(iter(changed.items()))
    raise UnsupportedModelError(
        f"This {type(model).__name__} was patched with {before[stack]} layers in its {stack}, and has {len(own)} now; a model that "
        f"is built from its config would have others, so that the checkpoint could not be loaded. Say it in the config "
        f"before you save: model.config.num_hidden_layers = {len(own)}, and whatever else has an entry for each layer. The "
        f"first layer of some models (T5, ModernBERT) is not made as the others are, and cannot be dropped."
    )


def _candidates(
    config: PreTrainedConfig, before: dict[str, int], changed: dict[str, list[AttentionLayer]]
) -> Iterator[PreTrainedConfig]:
    """The config as it is, and with each number in it that may be the number of layers of a changed stack set to what is there."""
    yield copy.deepcopy(config)
    ways = []
    for stack, own in changed.items():
        holders = [("", config), *((n, c) for n, c in config.__dict__.items() if isinstance(c, PreTrainedConfig))]
        names = [
            (place, name, own)
            for place, holder in holders
            for name in COUNTS
            if holder.__dict__.get(name) == before[stack]
        ]
        ways.append(names)
    for choice in product(*ways):
        tried = copy.deepcopy(config)
        for place, name, own in choice:
            holder = getattr(tried, place) if place else tried
            _shorten_lists(holder, getattr(holder, name), own)
            setattr(holder, name, len(own))
        yield tried


def _shorten_lists(config: PreTrainedConfig, depth: int, attention_layers: list[AttentionLayer]) -> None:
    """Keep those entries of a list with one for each layer (`layer_types`) that belong to the layers that are there."""
    places = [
        attention_layer.module.__dict__[PLACE][1]
        for attention_layer in attention_layers
        if PLACE in attention_layer.module.__dict__
    ]
    for name, value in config.__dict__.items():
        if name.endswith("layer_types") and isinstance(value, list) and len(value) == depth:
            config.__dict__[name] = [value[place] for place in places]


def _builds(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model of this config has the layers of the given one: the same tensors."""
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(config))
    except (SynthesizerError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return _shapes(made) == _shapes(model)


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size | None]:
    """The names of all tensors, and the shapes of those in attention layers (a head may have been replaced by a larger one)."""
    layers = tuple(f"{attention_layer.name}." for attention_layer in find_attention_layers(model)[0])
    return {name: tensor.shape if name.startswith(layers) else None for name, tensor in model.state_dict().items()}


def _guard(layer: SynthesizerMixin) -> Guard:
    return next(module for module in layer.modules() if isinstance(module, Guard))
