"""The config of a patched model: a copy, because the stock object may belong to other models and comes back with `unpatch_model`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


@dataclass
class PatchedConfig:
    """The stock config object, the patched model's copy of it, and what the copy held when it was made."""

    stock: PreTrainedConfig
    patched: PreTrainedConfig
    at_start: dict[str, Any]

    @classmethod
    def of(
        cls, stock: PreTrainedConfig, config_class: type[PreTrainedConfig], description: dict[str, Any]
    ) -> PatchedConfig:
        """A copy of the other class, with the description of the patch in it."""
        patched = copy.deepcopy(stock)
        patched.__class__ = config_class
        patched.synthesizer = description
        return cls(stock, patched, copy.deepcopy(patched.__dict__))

    def pairs(self) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
        """The stock config and the copy, and likewise the configs in them: those of the towers of a larger model."""
        waiting = [(self.stock, self.patched)]
        while waiting:
            old, new = waiting.pop()
            yield old, new
            for name, value in old.__dict__.items():
                other = new.__dict__.get(name)
                if isinstance(value, PreTrainedConfig) and isinstance(other, PreTrainedConfig):
                    waiting.append((value, other))

    def restore_stock(self, current: PreTrainedConfig) -> PreTrainedConfig:
        """The stock object, with what was set on the patched model's config since, such as the size of a vocabulary."""
        for name, value in current.__dict__.items():
            if name == "architectures":  # of the patched class, where it was saved
                continue
            if name not in self.at_start or not _same(value, self.at_start[name]):
                self.stock.__dict__[name] = value
        return self.stock


def _same(value: Any, other: Any) -> bool:
    """Whether two values of configs are equal. A config is what it holds: one that differs from layer to layer refuses to be
    asked for its attributes, and so to be compared."""
    if type(value) is not type(other):
        return False
    if isinstance(value, PreTrainedConfig):
        value, other = value.__dict__, other.__dict__
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(item, other[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(value == other)


def replace_configs(model: nn.Module, pairs: Iterable[tuple[PreTrainedConfig, PreTrainedConfig]]) -> None:
    """Wherever a module of the model refers to the first config of a pair, let it refer to the second."""
    others = {id(old): new for old, new in pairs}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if id(value) in others:
                module.__dict__[name] = others[id(value)]
