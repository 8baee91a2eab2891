"""Makes the synthesized classes of stock classes, each at its first use, and adds them to `hf_synthesizer.models`."""

from __future__ import annotations

import re
import sys
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.conversions import convert_as_stock
from ..errors import UnsupportedModelError
from ..layers.finding.layer_classes import synthesizer_class
from ..layers.finding.stock_classes import CLASSES, PREFIX, find_attention, find_config_or_model
from .model_mixin import SynthesizerModelMixin
from .model_types import MODEL_TYPE_PREFIX
from .registration import register_auto_classes
from .towers import TowerConfig


def synthesized_class(stock_name: str) -> type:
    """The synthesized class of the stock class of that name: of a config, a model or an attention layer.

    Raises:
        LookupError, ImportError: where the installed Transformers has none.
    """
    stock = find_config_or_model(stock_name)
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig):
        return config_class(stock)
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return model_class(stock)
    keeps_stock_forward, as_saved = stock_name.endswith("WithStockForward"), stock_name.endswith("AsSaved")
    attention = find_attention(stock_name.removesuffix("WithStockForward").removesuffix("AsSaved"))
    return synthesizer_class(attention, keeps_stock_forward=keeps_stock_forward, as_saved=as_saved)


class SynthesizerModelType:
    """The `model_type` of a synthesized config class, which differs for the class and for its objects.

    - `SynthesizerWhisperConfig.model_type` is "synthesizer_whisper". Transformers reads it from the class to write
      `config.json`, and to register the class. A Transformers that does not know the type refuses the checkpoint.
    - `config.model_type` is "whisper". Transformers reads it from the object to choose how a generation begins, what a pipeline
      passes, how tensors are named. A patched model needs the same as the stock model.

    Assignments have no effect: configs assign the value of `config.json`.
    """

    def __init__(self, stock: str):
        self.stock = stock

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> str:
        return MODEL_TYPE_PREFIX + self.stock if config is None else self.stock

    def __set__(self, config: PreTrainedConfig, value: str) -> None:
        pass


def describes_patch(config: PreTrainedConfig) -> bool:
    """Whether a config describes a patched model."""
    return type(config).model_type.startswith(MODEL_TYPE_PREFIX)


def config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """`SynthesizerXxxConfig`: the stock config with another `model_type`, and the field `synthesizer`."""

    new: list[type[PreTrainedConfig]] = []

    def make() -> type[PreTrainedConfig]:
        cls = type(
            f"{PREFIX}{stock.__name__}",
            (TowerConfig, stock) if stock.base_config_key else (stock,),
            {
                "__module__": CLASSES,
                "__doc__": f"`{stock.__name__}`, and which layers are synthesized and how.",
                "__annotations__": {"synthesizer": "dict | None"},
                "synthesizer": None,
                "model_type": SynthesizerModelType(stock.model_type),
                "base_model_tp_plan": _without_attention(stock.base_model_tp_plan),
            },
        )
        new.append(cls)
        return cls

    cls = _kept(stock, make)
    if new:  # only now: without a private name of Transformers this makes the model classes, which ask for this class
        register_auto_classes(stock, cls)
    return cls


def _without_attention(plan: dict[str, str] | None) -> dict[str, str] | None:
    """A plan of tensor parallelism with whole attention layers on each device, because a synthesizer computes all heads at once."""
    if plan is None:
        return None
    return {rule: style for rule, style in plan.items() if not _ATTENTION.search(rule)}


_ATTENTION = re.compile(r"(^|\.)(self_)?att(entio)?n(\.|$)")


def model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`SynthesizerXxx` of a model class, which builds the patched layers that its config describes."""

    def make() -> type[PreTrainedModel]:
        members = {
            "__module__": CLASSES,
            "__doc__": f"`{stock.__name__}` with synthesized self-attention.",
            "config_class": config_class(cast(type[PreTrainedConfig], stock.config_class)),
        }
        cls = type(f"{PREFIX}{stock.__name__}", (SynthesizerModelMixin, stock), members)
        convert_as_stock(stock, cls)
        return cls

    return _kept(stock, make)


def _kept(stock: type, make: Any) -> Any:
    """The synthesized class of a stock class. The first call makes it, and adds it to `hf_synthesizer.models` under its name."""
    if stock not in _SYNTHESIZED:
        cls = _SYNTHESIZED[stock] = make()
        setattr(sys.modules[CLASSES], cls.__name__, cls)
    return _SYNTHESIZED[stock]


_SYNTHESIZED: dict[type, type] = {}


def stock_of(patched: type) -> type:
    """The stock class of a synthesized class, or of a subclass that a wrapper made.

    Raises:
        UnsupportedModelError: for any other class.
    """
    for cls in patched.__mro__:
        for stock, synthesized in _SYNTHESIZED.items():
            if synthesized is cls:
                return stock
    raise UnsupportedModelError(f"{patched.__name__} is no synthesized class.")
