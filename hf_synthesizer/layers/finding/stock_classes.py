"""Stock classes by name: configs, models and attention layers, of Transformers and from outside it."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

PREFIX = "Synthesizer"
"""Prefix of the names of synthesized classes."""
CLASSES = "hf_synthesizer.models"
"""The module of synthesized classes."""

_OUTSIDE: dict[str, type] = {}
"""Stock classes that are not Transformers' own, by name."""


def register_outside_classes(*classes: type) -> None:
    """Let classes from outside Transformers be found by their names."""
    _OUTSIDE.update({cls.__name__: cls for cls in classes})


def is_stock_model(cls: type) -> bool:
    """Whether a class is one that a patched checkpoint can be loaded into again: Transformers' own, or registered."""
    if not issubclass(cls, PreTrainedModel) or cls.config_class is None:
        return False
    if _OUTSIDE.get(cls.__name__) is cls:
        return True
    return cls.__module__.startswith("transformers.") and getattr(transformers, cls.__name__, None) is cls


def name_of_attention(stock: type[nn.Module]) -> str:
    """The name of the synthesized class of an attention class. It contains the name of the model."""
    if _OUTSIDE.get(stock.__name__) is stock:
        return PREFIX + stock.__name__
    for prefix in _prefixes(stock.__name__):
        if getattr(_modeling(prefix), stock.__name__, None) is stock:
            return PREFIX + stock.__name__
    folder = stock.__module__.rpartition(".")[0].rpartition(".")[2]
    prefixes = [
        prefix for prefix, model_type in _model_types().items() if model_type_to_module_name(model_type) == folder
    ]
    return PREFIX + min(prefixes, key=len, default="") + stock.__name__


def find_attention(name: str) -> type[nn.Module]:
    """The stock attention class whose synthesized class is called `PREFIX + name`: the inverse of `name_of_attention`.

    Raises:
        LookupError: where no modeling file defines one.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    broken = []
    for prefix in _prefixes(name):
        modeling = _modeling(prefix)
        if isinstance(modeling, ImportError):
            broken.append(f"{prefix}'s could not be imported: {modeling}")
            continue
        cls = getattr(modeling, name, None) or getattr(modeling, name.removeprefix(prefix), None)
        if isinstance(cls, type):
            return cls
    raise LookupError("; ".join([f"no modeling file of transformers defines {name!r}", *broken]))


def find_config_or_model(name: str) -> Any:
    """The config or model class of that name, from outside Transformers, exported by it, or the config of a model type; else None."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
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
    """The modeling file of a model, or the error of its import: a broken file must not stop the search in the others."""
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
