"""What the package does with private names of Transformers; `REGISTER` says what each is for.

The import of this file does not import Transformers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import look_up, unsupported, warn_missing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOADED = "_is_hf_initialized"
"""An attribute of tensors and modules that a checkpoint has filled. `require_missing_nothing` checks it."""

_AUTO = "transformers.models.auto.auto_factory"
_CONVERSIONS = "transformers.core_model_loading#_weight_conversions"


def record_outputs(model: PreTrainedModel) -> None:
    """Let Transformers record the outputs of the class that a model has now. It knows the class of `__init__` alone."""
    path = "transformers.utils.output_capturing._CAN_RECORD_REGISTRY"
    registry = look_up(path)
    if registry is None:
        warn_missing(path)
        return
    # Up to Transformers 5.22 the keys are names of classes.
    registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs


def wrap_added_configs(wrapper: type[dict]) -> None:
    """Let `CONFIG_MAPPING` keep added model types in a dictionary of this class: once."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = "transformers.models.auto.configuration_auto#_extra_content"
    attribute = look_up(path)
    if attribute is None:
        warn_missing(path)
    elif not isinstance(getattr(CONFIG_MAPPING, attribute), wrapper):
        setattr(CONFIG_MAPPING, attribute, wrapper(getattr(CONFIG_MAPPING, attribute)))


def model_mapping(auto_class: Any) -> Any:
    """The mapping of an Auto class from config classes to model classes; None for any other class."""
    attribute = look_up(f"{_AUTO}#_model_mapping")
    if attribute is None:
        warn_missing(f"{_AUTO}#_model_mapping")
        return None
    return getattr(auto_class, attribute, None)


def name_model_class(mapping: Any, config_class: type[PreTrainedConfig], class_name: str, module: str) -> bool:
    """Register a model class by its name. Transformers gets it from the module later. False if this cannot be done."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    attributes = ("_reverse_config_mapping", "_model_mapping", "_modules")
    if None in [look_up(f"{_AUTO}#{name}") for name in attributes]:
        return False
    model_type = config_class.model_type
    mapping._reverse_config_mapping[config_class.__name__] = model_type
    mapping._model_mapping.setdefault(model_type, class_name)
    mapping._modules[model_type_to_module_name(model_type)] = sys.modules[module]
    return True


def class_name_in(auto_class: Any, config_class: type[PreTrainedConfig]) -> str | None:
    """The name of the model class that an Auto class has for a config class; None if it has none."""
    mapping = model_mapping(auto_class)
    if look_up(f"{_AUTO}#_reverse_config_mapping") is not None:
        return mapping._model_mapping.get(config_class.model_type)
    cls = mapping.get(config_class, None)
    return None if cls is None else cls.__name__


def share_entry(mapping: Any, stock: type[PreTrainedConfig], added: type[PreTrainedConfig]) -> None:
    """Give an added config class the entry of the stock one in a mapping, without an import where possible."""
    attributes = ("_extra_content", "_config_mapping", "_reverse_config_mapping", "_model_mapping")
    if None in [look_up(f"{_AUTO}#{name}") for name in attributes]:
        if stock in mapping:
            mapping.register(added, mapping[stock], exist_ok=True)
        return
    if stock in mapping._extra_content:  # from outside Transformers
        mapping.register(added, mapping._extra_content[stock], exist_ok=True)
        return
    first = mapping._reverse_config_mapping.get(stock.__name__)
    others = [model_type for model_type, name in mapping._config_mapping.items() if name == stock.__name__]
    # Several model types may have one config class, and the mapping may know some of them alone.
    known = [model_type for model_type in (first, *others) if model_type in mapping._model_mapping]
    if known:
        mapping._reverse_config_mapping[added.__name__] = known[0]


def patterns_of(conversion: Any) -> tuple[list[str], list[str]]:
    """The patterns of a conversion of names as its author wrote them: sources and targets."""
    module = "transformers.core_model_loading"
    source = look_up(f"{module}#_original_source_patterns") or "source_patterns"
    target = look_up(f"{module}#_original_target_patterns") or "target_patterns"
    return list(getattr(conversion, source)), list(getattr(conversion, target))


def conversions_of(model: PreTrainedModel) -> Any:
    """The conversions of names that saving undoes; None if the model was not loaded."""
    return model.__dict__.get(look_up(_CONVERSIONS))


def set_conversions(model: PreTrainedModel, conversions: Any) -> None:
    """Set the conversions of names that saving undoes.

    Raises:
        UnsupportedModelError: if there are any, and Transformers reads them from elsewhere.
    """
    attribute = look_up(_CONVERSIONS)
    if attribute is not None:
        model.__dict__[attribute] = conversions
    elif conversions:
        raise unsupported(_CONVERSIONS)
