"""Describes a patched model from which a user has dropped layers (`encoder.layer = encoder.layer[:3]`)."""

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
"""Names of the number of layers in configs."""


def describe_remaining_layers(model: PreTrainedModel, attention_layers: list[AttentionLayer]) -> None:
    """Let the config of a patched model describe and count the layers that are left, before the model is saved.

    A config whose description is as deep as the model stays as it is. In any other, the number of layers follows, and so do
    lists with an entry for each layer. A model without memory is built from it to see that it fits.

    Args:
        model: a patched model.
        attention_layers: of the model.

    Raises:
        UnsupportedModelError: if no number in the config makes a model of these layers; the config is as it was.
    """
    described: dict[str, Any] | None = getattr(model.config, "synthesizer", None)
    if described is None:
        return
    before = {stack: len(rows) for stack, rows in described["layers"].items()}
    stacks = {stack: [layer for layer in attention_layers if layer.stack == stack] for stack in before}
    changed = {stack: layers for stack, layers in stacks.items() if layers and len(layers) != before[stack]}
    if not changed:
        return
    remaining = [layer for layers in changed.values() for layer in layers]
    synthesized = {layer.label: layer.module for layer in remaining if isinstance(layer.module, SynthesizerMixin)}
    plan = {label: _guard(module).guarded for label, module in synthesized.items()}
    served = {label: module.__dict__["served"] for label, module in synthesized.items()}
    description = plan_to_json(plan, remaining, served, described.get("base_model"), others=described)
    shapes = _shapes(model, attention_layers)
    for config in _candidates(model.config, before, changed):
        config.synthesizer = description
        if _builds(type(model), config, shapes):
            model.config.__dict__.update(config.__dict__)
            return
    stack, layers = next(iter(changed.items()))
    raise UnsupportedModelError(
        f"This {type(model).__name__} was patched with {before[stack]} layers in its {stack}, and has {len(layers)} now; a model that "
        f"is built from its config would have others, so that the checkpoint could not be loaded. Say it in the config "
        f"before you save: model.config.num_hidden_layers = {len(layers)}, and whatever else has an entry for each layer. The "
        f"first layer of some models (T5, ModernBERT) is not made as the others are, and cannot be dropped."
    )


def _candidates(
    config: PreTrainedConfig, before: dict[str, int], changed: dict[str, list[AttentionLayer]]
) -> Iterator[PreTrainedConfig]:
    """The config as it is, then with every choice of numbers that may count the layers of the changed stacks, set to their depth."""
    yield copy.deepcopy(config)
    holders = [("", config), *((n, c) for n, c in config.__dict__.items() if isinstance(c, PreTrainedConfig))]
    choices = [
        [
            (place, name, layers)
            for place, holder in holders
            for name in COUNTS
            if holder.__dict__.get(name) == before[stack]
        ]
        for stack, layers in changed.items()
    ]
    for choice in product(*choices):
        candidate = copy.deepcopy(config)
        for place, name, layers in choice:
            holder = getattr(candidate, place) if place else candidate
            _shorten_lists(holder, getattr(holder, name), layers)
            setattr(holder, name, len(layers))
        yield candidate


def _shorten_lists(config: PreTrainedConfig, depth: int, attention_layers: list[AttentionLayer]) -> None:
    """Shorten a list with an entry for each layer (`layer_types`) to the entries of these layers."""
    modules = [layer.module for layer in attention_layers]
    indices = [module.__dict__[PLACE][1] for module in modules if PLACE in module.__dict__]
    for name, value in config.__dict__.items():
        if name.endswith("layer_types") and isinstance(value, list) and len(value) == depth:
            config.__dict__[name] = [value[index] for index in indices]


def _builds(cls: type[PreTrainedModel], config: PreTrainedConfig, shapes: dict[str, torch.Size | None]) -> bool:
    """Whether a model of this config has tensors of these names and shapes."""
    try:
        with torch.device("meta"):
            candidate = cls(copy.deepcopy(config))
    except (SynthesizerError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return _shapes(candidate, find_attention_layers(candidate).layers) == shapes


def _shapes(model: PreTrainedModel, attention_layers: list[AttentionLayer]) -> dict[str, torch.Size | None]:
    """The names of all tensors, with the shapes of those in attention layers. (A user may have replaced a head by a larger one.)"""
    layers = tuple(f"{layer.name}." for layer in attention_layers)
    return {name: tensor.shape if name.startswith(layers) else None for name, tensor in model.state_dict().items()}


def _guard(layer: SynthesizerMixin) -> Guard:
    return next(module for module in layer.modules() if isinstance(module, Guard))
