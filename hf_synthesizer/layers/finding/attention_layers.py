"""The self-attention layers of a model: what each stack of them is called, and which number each layer has."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..mixin import SynthesizerMixin
from .model_types import is_attention, model_type_of

CROSS = re.compile("cross|encoder_attn|encdec|encoder_attention", re.IGNORECASE)
"""What models call the attention of a decoder to its encoder."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model: its dotted name, its stack ("encoder"), its index there, and the module."""

    name: str
    stack: str
    index: int
    module: nn.Module

    @property
    def label(self) -> str:
        return f"{self.stack}.{self.index}"


def find_attention_layers(model: PreTrainedModel) -> tuple[list[AttentionLayer], list[str]]:
    """The self-attention layers of a model, and the names of its cross-attention layers.

    A stack is a series of layers whose names differ in their numbers alone. It is called after the first word by which its
    name differs from the other stacks' ("encoder", "text_model", "visual"); the only stack of a model is its "decoder" if
    it is causal, and else its "encoder".

    Raises:
        UnsupportedModelError: for what is no Transformers model.
    """
    model_type = model_type_of(model)
    own: list[tuple[str, nn.Module]] = []
    cross = []
    for name, module in model.named_modules():
        if not isinstance(module, SynthesizerMixin) and not is_attention(module, model_type):
            continue
        if _is_cross_attention(name, module):
            cross.append(name)
        elif _attends_to_its_input(module):
            own.append((name, module))
    groups: dict[tuple[str, ...], list[tuple[str, nn.Module]]] = {}
    for name, module in own:
        words = tuple(word for word in name.split(".") if not word.isdigit())
        groups.setdefault(words, []).append((name, module))
    stacks = _stack_names(groups)
    attention_layers = [
        AttentionLayer(name, stacks[words], index, module)
        for words, members in groups.items()
        for index, (name, module) in enumerate(members)
    ]
    order = {name: place for place, (name, _) in enumerate(own)}
    return sorted(attention_layers, key=lambda attention_layer: order[attention_layer.name]), cross


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False):
        return True
    return bool(CROSS.search(".".join(name.split(".")[-2:])) or re.search("Cross", type(module).__name__))


def _attends_to_its_input(module: nn.Module) -> bool:
    """Whether a forward takes hidden states, and not queries, keys and values that others have made."""
    _, *parameters = inspect.signature(type(module).forward).parameters  # the object may have been given another one
    return parameters[:1] == ["hidden_states"]


def _stack_names(groups: dict[tuple[str, ...], list[tuple[str, nn.Module]]]) -> dict[tuple[str, ...], str]:
    if len(groups) == 1:
        (words, members), *_ = groups.items()
        named = next((word for word in ("encoder", "decoder") if word in words), None)
        return {words: named or ("decoder" if getattr(members[0][1], "is_causal", False) else "encoder")}
    names: dict[tuple[str, ...], str] = {}
    for words in groups:
        others = [other for other in groups if other != words]
        for length in range(1, len(words) + 1):
            if not any(other[:length] == words[:length] for other in others):
                names[words] = words[length - 1]
                break
        else:
            names[words] = "_".join(words)
    if len(set(names.values())) < len(names):
        return {words: "_".join(words) for words in groups}
    return names
