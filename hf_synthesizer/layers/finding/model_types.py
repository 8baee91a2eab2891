"""Which model types can be patched. A few need an entry here, because their code does not name their attention."""

from __future__ import annotations

import csv
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import InvalidConfigError, UnsupportedModelError
from ..patched import is_patched_class
from .hints import suggest_inner_model
from .stock_classes import is_stock_model, register_outside_classes
from .stock_code import uses_attention_interface

SERVED = Path(__file__).parent / "served.csv"
"""Written by benchmarks/model_types/survey.py."""


@dataclass(frozen=True)
class ModelType:
    """The attention classes of a model type, and its classes from outside Transformers.

    Most types need none: their attention uses Transformers' attention interface, and their signature says which layer class
    serves them.

    Attributes:
        name: the stock `model_type`, such as "mpnet".
        attention: the attention classes, or their names "module:Class"; those that use the interface need not be named.
        models: model classes, and their config class, from outside Transformers.
    """

    name: str
    attention: tuple[type[nn.Module] | str, ...] = ()
    models: tuple[type[PreTrainedModel] | type[PreTrainedConfig], ...] = ()

    def attention_classes(self) -> tuple[type[nn.Module], ...]:
        """The attention classes themselves."""
        return tuple(_imported(cls) if isinstance(cls, str) else cls for cls in self.attention)


_MODEL_TYPES: dict[str, ModelType] = {
    name: ModelType(name, attention=(attention,))
    for name, attention in {"mpnet": "transformers.models.mpnet.modeling_mpnet:MPNetSelfAttention"}.items()
}


def register_model_type(model_type: ModelType) -> ModelType:
    """Register a model type.

    Raises:
        InvalidConfigError: for a name that is registered with something else.
    """
    if _MODEL_TYPES.get(model_type.name, model_type) != model_type:
        raise InvalidConfigError(
            f"The model type {model_type.name!r} is registered already, as {_MODEL_TYPES[model_type.name]}."
        )
    register_outside_classes(*model_type.models, *(cls for cls in model_type.attention if isinstance(cls, type)))
    _MODEL_TYPES[model_type.name] = model_type
    return model_type


def model_type_of(model: Any) -> ModelType:
    """The model type of a model, stock or patched.

    Raises:
        UnsupportedModelError: for anything but a Transformers model of a class that a checkpoint can name. The message says what to
            patch instead.
    """
    if not isinstance(model, PreTrainedModel):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UnsupportedModelError(
            f"patch_model works on Transformers models (PreTrainedModel), not on {kind}.{suggest_inner_model(model)}"
        )
    name = model.config.model_type
    if not is_patched_class(type(model)) and not is_stock_model(type(model)):
        inner = getattr(model, model.base_model_prefix, None)
        if isinstance(inner, PreTrainedModel) and inner is not model:
            base = f"model.{model.base_model_prefix}"
            hint = (
                f" Patch its base model instead: patch_model({base}, …), then `model.config = {base}.config`, so that it is "
                f"saved as a patched one. To load it again, {type(model).__name__} has to build the base that its config describes, "
                f"in its __init__: `self.{model.base_model_prefix} = AutoModel.from_config(config)`; then "
                f"`{type(model).__name__}.from_pretrained(folder, config=AutoConfig.from_pretrained(folder))` loads it "
                f"(docs/checkpoints.md, 'As a part of a larger model')."
            )
        else:
            hint = (
                " If it is a part of a larger model, patch that one and name the stack: patch_model(model, …, "
                "layers={'encoder': True})."
            )
        raise UnsupportedModelError(
            f"{type(model).__name__} is none of the classes that Transformers exports, so that a checkpoint of it could not be "
            f"loaded again.{hint}"
        )
    return _MODEL_TYPES.get(name) or ModelType(name)


def list_model_types() -> list[str]:
    """The model types that `patch_model` is known to serve, whether the installed Transformers has them or not, and the
    registered ones.

    docs/models.md says which layer class serves each, and why others are refused.
    """
    return sorted({*served_types(), *_MODEL_TYPES})


@cache
def served_types() -> dict[str, str]:
    """The layer class of each model type that passed benchmarks/model_types/survey.py."""
    with SERVED.open(newline="") as file:
        return {row["model_type"]: row["layer_class"] for row in csv.DictReader(file)}


def is_attention(module: nn.Module, model_type: ModelType) -> bool:
    """Whether a module is a stock attention layer."""
    return isinstance(module, model_type.attention_classes()) or uses_attention_interface(type(module))


def _imported(name: str) -> type[nn.Module]:
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls)
