"""Finds the self-attention layers of a model, and gives each stack a name and each layer an index."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...synthesizers import Synthesizer
from ..mixin import SynthesizerMixin
from .model_types import is_attention, model_type_of

CROSS_ATTENTION = re.compile("cross|encoder_attn|encdec|encoder_attention", re.IGNORECASE)
"""In the names of a decoder's attention to its encoder."""

Stack = tuple[str, ...]
"""The words in the names of a stack's layers, without numbers."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model: its dotted name, its stack ("encoder"), its index in the stack, and the module."""

    name: str
    stack: str
    index: int
    module: nn.Module

    @property
    def label(self) -> str:
        return f"{self.stack}.{self.index}"

    @property
    def synthesizer(self) -> Synthesizer | None:
        """The layer's synthesizer; None for a stock layer."""
        return self.module.synthesizer if isinstance(self.module, SynthesizerMixin) else None


class AttentionLayers(NamedTuple):
    """The self-attention layers of a model, and the names of its cross-attention layers."""

    layers: list[AttentionLayer]
    cross_attention: list[str]


def find_attention_layers(model: PreTrainedModel) -> AttentionLayers:
    """The attention layers of a model, stock or synthesized.

    A stack is a series of layers whose names differ only in their numbers. Its name is the first word by which its layers
    differ from those of other stacks ("encoder", "text_model", "visual"). The only stack of a model is its "decoder" if it is
    causal, else its "encoder".

    Raises:
        UnsupportedModelError: for anything but a Transformers model.
    """
    model_type = model_type_of(model)
    self_attention: dict[str, nn.Module] = {}
    cross_attention = []
    for name, module in model.named_modules():
        if not isinstance(module, SynthesizerMixin) and not is_attention(module, model_type):
            continue
        if _is_cross_attention(name, module):
            cross_attention.append(name)
        elif _attends_to_its_input(module):
            self_attention[name] = module
    stacks: dict[Stack, list[nn.Module]] = {}
    for name, module in self_attention.items():
        stacks.setdefault(_stack_of(name), []).append(module)
    names = _stack_names(stacks)
    layers, depths = [], dict.fromkeys(stacks, 0)
    for name, module in self_attention.items():
        stack = _stack_of(name)
        layers.append(AttentionLayer(name, names[stack], depths[stack], module))
        depths[stack] += 1
    return AttentionLayers(layers, cross_attention)


def _stack_of(name: str) -> Stack:
    return tuple(word for word in name.split(".") if not word.isdigit())


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False):
        return True
    return bool(CROSS_ATTENTION.search(".".join(name.split(".")[-2:])) or re.search("Cross", type(module).__name__))


def _attends_to_its_input(module: nn.Module) -> bool:
    """Whether a forward takes hidden states, and not queries, keys and values that other modules have projected."""
    _, *parameters = inspect.signature(type(module).forward).parameters  # the object may have been given another one
    return parameters[:1] == ["hidden_states"]


def _stack_names(stacks: dict[Stack, list[nn.Module]]) -> dict[Stack, str]:
    if len(stacks) == 1:
        (words, modules), *_ = stacks.items()
        named = next((word for word in ("encoder", "decoder") if word in words), None)
        return {words: named or ("decoder" if getattr(modules[0], "is_causal", False) else "encoder")}
    names: dict[Stack, str] = {}
    for words in stacks:
        others = [other for other in stacks if other != words]
        for length in range(1, len(words) + 1):
            if not any(other[:length] == words[:length] for other in others):
                names[words] = words[length - 1]
                break
        else:
            names[words] = "_".join(words)
    if len(set(names.values())) < len(names):
        return {words: "_".join(words) for words in stacks}
    return names
