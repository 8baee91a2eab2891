"""The synthesized classes of every model type, made when they are first asked for: `SynthesizerLlamaForCausalLM`,
`SynthesizerLlamaConfig`, `SynthesizerLlamaAttention`.

Each stands in this module under its name, so that it can be imported and pickled, and found by a checkpoint's `auto_map`.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any, cast

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from .errors import UnsupportedModelError
from .layers.layer_classes import synthesizer_class

PREFIX = "Synthesizer"
MODEL_TYPE_PREFIX = "synthesizer_"


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _make(name.removeprefix(PREFIX))
    except (ImportError, LookupError) as error:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: the installed transformers has no class "
            f"{name.removeprefix(PREFIX)!r} that could be synthesized ({error})"
        ) from error


def _make(stock_name: str) -> type:
    """The synthesized class of the stock class of that name."""
    own = _OUTSIDE.get(stock_name)
    found = own if own is not None else _in_transformers(stock_name)
    if isinstance(found, type) and issubclass(found, PreTrainedConfig):
        return config_class(found)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return model_class(found)
    keeps_stock_forward, as_saved = stock_name.endswith("WithStockForward"), stock_name.endswith("AsSaved")
    stock = _stock_attention(stock_name.removesuffix("WithStockForward").removesuffix("AsSaved"))
    return synthesizer_class(stock, keeps_stock_forward=keeps_stock_forward, as_saved=as_saved)


_OUTSIDE: dict[str, type] = {}
"""Stock classes that are not Transformers' own, by name."""


def adopt(*classes: type) -> None:
    """Let classes from outside Transformers be found by their names."""
    _OUTSIDE.update({cls.__name__: cls for cls in classes})


class ModelType:
    """The `model_type` of a synthesized config class: a class is asked what a checkpoint says, an object what its model is.

    - `SynthesizerWhisperConfig.model_type` is "synthesizer_whisper". Transformers reads it off the class to write
      `config.json`, and to register it. A Transformers that does not know it stops there.
    - `config.model_type` is "whisper". Transformers reads it off the object to choose what the model needs: how a generation
      begins, what a pipeline hands over, how tensors are named. A patched model needs what the stock model needs.

    Assignments are passed over: configs assign what stood in `config.json`.
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
    """`SynthesizerXxxConfig`: the stock config with a `model_type` of its own, and a field for what is synthesized."""

    def make() -> type[PreTrainedConfig]:
        from .patching.towers import TowerConfig

        return type(
            f"{PREFIX}{stock.__name__}",
            (TowerConfig, stock) if stock.base_config_key else (stock,),
            {
                "__module__": __name__,
                "__doc__": f"`{stock.__name__}`, and which layers are synthesized and how.",
                "__annotations__": {"synthesizer": "dict | None"},
                "synthesizer": None,
                "model_type": ModelType(stock.model_type),
                "base_model_tp_plan": _without_attention(stock.base_model_tp_plan),
            },
        )

    made = _kept(stock, make)
    if made not in _REGISTERED:
        from .checkpoints.auto import register_auto_classes

        _REGISTERED.add(made)
        register_auto_classes(stock, made)
    return made


def _without_attention(plan: dict[str, str] | None) -> dict[str, str] | None:
    """A plan of tensor parallelism that leaves attention whole on each device: logits are made for all heads at once."""
    if plan is None:
        return None
    return {rule: style for rule, style in plan.items() if not _ATTENTION.search(rule)}


_ATTENTION = re.compile(r"(^|\.)(self_)?att(entio)?n(\.|$)")
_REGISTERED: set[type[PreTrainedConfig]] = set()


def model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`SynthesizerXxx` of a model class, which builds the patched layers that its config describes."""
    own = config_class(
        cast(type[PreTrainedConfig], stock.config_class)
    )  # which makes this class too, for Auto classes

    def make() -> type[PreTrainedModel]:
        from .checkpoints.conversions import convert_as_stock
        from .checkpoints.model_mixin import SynthesizerModelMixin

        members = {
            "__module__": __name__,
            "__doc__": f"`{stock.__name__}` with synthesized self-attention.",
            "config_class": own,
        }
        made = type(f"{PREFIX}{stock.__name__}", (SynthesizerModelMixin, stock), members)
        convert_as_stock(stock, made)
        return made

    return _kept(stock, make)


def is_stock_model(cls: type) -> bool:
    """Whether a class is one that a patched checkpoint can be loaded into again: Transformers' own, or registered."""
    if not issubclass(cls, PreTrainedModel) or cls.config_class is None:
        return False
    if _OUTSIDE.get(cls.__name__) is cls:
        return True
    return cls.__module__.startswith("transformers.") and getattr(transformers, cls.__name__, None) is cls


def name_of_attention(stock: type[nn.Module]) -> str:
    """What the synthesized class of an attention class is called: its model's name is in it, if need be in front."""
    if _OUTSIDE.get(stock.__name__) is stock:
        return PREFIX + stock.__name__
    for prefix in _prefixes(stock.__name__):
        if getattr(_modeling(prefix), stock.__name__, None) is stock:
            return PREFIX + stock.__name__
    folder = stock.__module__.rpartition(".")[0].rpartition(".")[2]
    own = [prefix for prefix, model_type in _model_types().items() if model_type_to_module_name(model_type) == folder]
    return PREFIX + min(own, key=len, default="") + stock.__name__


def _stock_attention(name: str) -> type[nn.Module]:
    """The inverse of `name_of_attention`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    broken = []
    for prefix in _prefixes(name):
        modeling = _modeling(prefix)
        if isinstance(modeling, ImportError):
            broken.append(f"{prefix}'s could not be imported: {modeling}")
            continue
        found = getattr(modeling, name, None) or getattr(modeling, name.removeprefix(prefix), None)
        if isinstance(found, type):
            return found
    raise LookupError("; ".join([f"no modeling file of transformers defines {name!r}", *broken]))


def _in_transformers(name: str) -> Any:
    """A class that Transformers exports, or a config of a model type."""
    if name.endswith("Config"):
        for model_type, config_name in CONFIG_MAPPING_NAMES.items():
            if config_name == name:
                module = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
                return getattr(module, name, None) or getattr(transformers, name)
    return getattr(transformers, name, None)


def _prefixes(name: str) -> list[str]:
    """The names of models that a class's name starts with, the longest first."""
    return sorted((prefix for prefix in _model_types() if name.startswith(prefix)), key=len, reverse=True)


@cache
def _model_types() -> dict[str, str]:
    """From a model's name in class names ("Llama") to its model type."""
    return {re.sub("Config$", "", config): model_type for model_type, config in CONFIG_MAPPING_NAMES.items()}


def _modeling(prefix: str) -> ModuleType | ImportError:
    """The modeling file of a model, or why there is none: one that is broken must not be in the way of the others."""
    model_type = _model_types()[prefix].replace("-", "_")
    folder = model_type_to_module_name(_model_types()[prefix])
    broken = ImportError(f"no modeling file in transformers.models.{folder}")
    # A folder may have a file for each of several models (Data2Vec), or one for a tower (Idefics).
    for name in (f"modeling_{model_type}", model_type.removeprefix(f"{folder}_"), f"modeling_{folder}"):
        try:
            return importlib.import_module(f"transformers.models.{folder}.{name}")
        except ImportError as error:
            broken = error
    return broken


def _kept(stock: type, make: Any) -> Any:
    """What was made of a stock class before, or is made now; under its name in this module."""
    made = _MADE.get(stock)
    if made is None:
        made = _MADE[stock] = make()
        setattr(sys.modules[__name__], made.__name__, made)
    return made


_MADE: dict[type, type] = {}


def stock_of(patched: type) -> type:
    """The stock class that a synthesized class, or a subclass that a wrapper made of it, came from.

    Raises:
        UnsupportedModelError: for any other class.
    """
    for cls in patched.__mro__:
        for stock, made in _MADE.items():
            if made is cls:
                return stock
    raise UnsupportedModelError(f"{patched.__name__} is no synthesized class.")
