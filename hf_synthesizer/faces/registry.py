"""The registry of families: which Transformers models can be patched, and how."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..errors import InvalidConfigError, UnsupportedModelError
from .mixin import SynthesizerMixin

logger = logging.get_logger(__name__)

_BUILT_IN = {"bert": "hf_synthesizer.faces.bert", "t5": "hf_synthesizer.faces.t5"}
_FAMILIES: dict[str, Family] = {}


@dataclass(frozen=True)
class Family:
    """Everything the library has to know of one forward signature.

    Attributes:
        name: the stock `model_type`, such as "bert".
        stock_attention: the class whose instances are swapped.
        attention: its synthesized subclass.
        config_class: the subclass of the stock config with a `model_type` of its own and a `synthesizer` field.
        models: stock model class → synthesized model class, for each head and the bare model.
        stack_of: from the module's dotted name and the module, the name of the stack that a self-attention layer
            belongs to ("encoder", "decoder"), or None for cross-attention, which stays as it is.
        inner_models: stock classes that are but parts of the others, with a config of their own: patched alone, the model
            around them would save a stock config.
    """

    name: str
    stock_attention: type[nn.Module]
    attention: type[SynthesizerMixin]
    config_class: type[PreTrainedConfig]
    models: dict[type[PreTrainedModel], type[PreTrainedModel]]
    stack_of: Callable[[str, Any], str | None]
    inner_models: tuple[type[PreTrainedModel], ...] = ()

    @property
    def stock_config(self) -> type[PreTrainedConfig]:
        """The config class that `config_class` extends."""
        return self.config_class.__mro__[1]


def register_family(family: Family) -> Family:
    """Make a family known to `patch_model` and to Transformers' Auto classes.

    Raises:
        InvalidConfigError: for a name that another family has.
    """
    from ..checkpoints.auto import register_auto_classes

    if family.name in _FAMILIES and _FAMILIES[family.name].attention is not family.attention:
        raise InvalidConfigError(f"The family {family.name!r} is registered already.")
    register_auto_classes(family)
    _FAMILIES[family.name] = family
    return family


def list_families() -> list[str]:
    """The names of all families: the `model_type`s that `patch_model` knows."""
    return sorted(_BUILT_IN.keys() | _FAMILIES.keys())


def get_family(name: str) -> Family:
    """The family of a stock `model_type`. A built-in one is imported at its first use.

    Raises:
        UnsupportedModelError: for an unknown family, or one that does not fit the installed Transformers.
    """
    if name not in _FAMILIES and name in _BUILT_IN:
        try:
            importlib.import_module(_BUILT_IN[name])
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(
                f"The family {name!r} does not fit the installed version of transformers ({error}). The other families "
                f"still work; install a version of transformers that hf_synthesizer was tested with, see its README."
            ) from error
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"No family for the model type {name!r}. Supported model types: {', '.join(list_families())}. A new one is "
            f"one file and one call of register_family()."
        )
    return _FAMILIES[name]


def family_of(model: Any) -> Family:
    """The family that serves a model, stock or patched.

    Raises:
        UnsupportedModelError: for anything else, with the way out where there is one.
    """
    if not isinstance(model, PreTrainedModel):
        inner = next((name for name in ("module", "_orig_mod", "base_model", "model") if hasattr(model, name)), None)
        hint = f" It seems to wrap another model: patch that one ({inner}) before it is wrapped." if inner else ""
        raise UnsupportedModelError(
            f"patch_model works on Transformers models (PreTrainedModel), not on {type(model).__name__}.{hint}"
        )
    name = model.config.model_type.removeprefix("synthesizer_")
    family = get_family(name)
    patched = any(cls in type(model).__mro__ for cls in family.models.values())
    if type(model) not in family.models and not patched:
        inner = getattr(model, model.base_model_prefix, None)
        base = f"model.{model.base_model_prefix}"
        hint = (
            f" Patch its base model instead: patch_model({base}, …), then model.config = {base}.config, so that it is saved "
            f"as a patched one (docs/checkpoints.md, 'As a part of a larger model')."
            if inner
            else ""
        )
        raise UnsupportedModelError(
            f"{type(model).__name__} is none of the {name!r} classes of Transformers "
            f"({', '.join(cls.__name__ for cls in family.models)}), so a checkpoint of it could not be loaded again."
            f"{hint}"
        )
    return family


def patched_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The `SynthesizerXxx` class of a patched model; its own class may be a subclass that a wrapper made (FSDP2)."""
    known = set(family_of(model).models.values())
    return next(cls for cls in type(model).__mro__ if cls in known)


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that a patched model had before."""
    patched = patched_class(model)
    return next(stock for stock, cls in family_of(model).models.items() if cls is patched)


def load_built_in_families() -> None:
    """Import every built-in family that fits the installed Transformers, so that the Auto classes know it."""
    for name in _BUILT_IN:
        try:
            get_family(name)
        except UnsupportedModelError as error:
            logger.warning_once(str(error))
