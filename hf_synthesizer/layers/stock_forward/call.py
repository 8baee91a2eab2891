"""One forward pass of a layer that keeps the stock forward, and the config under which the stock forward calls our function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..caching import KeptStep, Need

if TYPE_CHECKING:
    from .layer import StockForwardLayer

NAME = "hf_synthesizer"
"""The name of our attention function in Transformers' attention interface."""


@dataclass
class StockForwardCall:
    """One forward pass. It is an object of its own because several threads may use the same layer.

    Attributes:
        layer: the layer that is called.
        arguments: of the stock forward, by name.
        hidden_states: (B, L, d).
        key_states: what the logits need from the tokens of all keys, cached ones included once the cache is updated.
        start: the number of tokens before these.
        cache: of a decoder.
        needs: what the groups of heads need of the cache; empty if it keeps all tokens.
        returned: keys and values that the cache has returned to the stock forward.
        step: what the cache keeps, if it has dropped tokens. Then `returned` are placeholders.
        answered: whether the stock forward has called our attention function.
    """

    layer: StockForwardLayer
    arguments: Mapping[str, Any]
    hidden_states: torch.Tensor
    key_states: torch.Tensor | None
    start: int | torch.Tensor = 0
    cache: Any = None
    needs: list[Need] = field(default_factory=list)
    returned: tuple[torch.Tensor, torch.Tensor] | None = None
    step: KeptStep | None = None
    answered: bool = False

    def first(self, names: tuple[str, ...]) -> Any:
        """The first of these arguments that is not None; None if there is none."""
        return next((self.arguments[name] for name in names if self.arguments.get(name) is not None), None)


class StockForwardConfig:
    """A layer's config, but for the attention backend: it names our attention function."""

    def __init__(self, config: Any):
        self.__dict__["config"] = config

    @property
    def _attn_implementation(self) -> str:
        return NAME

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # while it is copied or unpickled, there is no config yet
            raise AttributeError(name)
        return getattr(self.__dict__["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)
