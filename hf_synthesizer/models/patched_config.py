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
    """The stock config, the patched model's copy, and the values of the copy at the start."""

    stock: PreTrainedConfig
    patched: PreTrainedConfig
    at_start: dict[str, Any]

    @classmethod
    def of(
        cls, stock: PreTrainedConfig, config_class: type[PreTrainedConfig], description: dict[str, Any]
    ) -> PatchedConfig:
        """Copy a config, with another class and the description of the patch."""
        patched = copy.deepcopy(stock)
        patched.__class__ = config_class
        patched.synthesizer = description
        return cls(stock, patched, copy.deepcopy(patched.__dict__))

    def pairs(self) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
        """Stock config and copy, and the pairs of configs in them (of the towers of a larger model)."""
        waiting = [(self.stock, self.patched)]
        while waiting:
            old, new = waiting.pop()
            yield old, new
            for name, value in old.__dict__.items():
                other = new.__dict__.get(name)
                if isinstance(value, PreTrainedConfig) and isinstance(other, PreTrainedConfig):
                    waiting.append((value, other))

    def restore_stock(self, current: PreTrainedConfig) -> PreTrainedConfig:
        """The stock config, with the values that a user has changed in the patched one, such as the size of a vocabulary."""
        for name, value in current.__dict__.items():
            if name == "architectures":  # of the patched class, where it was saved
                continue
            if name not in self.at_start or not _same(value, self.at_start[name]):
                self.stock.__dict__[name] = value
        return self.stock


def _same(value: Any, other: Any) -> bool:
    """Whether two values of configs are equal. Configs are compared by their `__dict__`: one that differs from layer to layer
    raises an error when its attributes are read."""
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
    """Replace the first config of each pair by the second, in all modules of the model."""
    others = {id(old): new for old, new in pairs}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if id(value) in others:
                module.__dict__[name] = others[id(value)]
