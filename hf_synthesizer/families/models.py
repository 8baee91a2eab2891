"""Patched models as Transformers sees them: own model and config classes, so that a checkpoint cannot be mistaken."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CheckpointMismatchError
from .mixin import SynthesizerMixin


class SynthesizerModelMixin:
    """Mixed into each stock model class: builds the patched layers that `config.synthesizer` describes."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        from ..patching import rebuild

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        rebuild(self)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        # The stock initialisation of an attention module expects its query and key; ours are initialised when built.
        if not isinstance(module, SynthesizerMixin):
            super()._init_weights(module)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, but strict: no tensor of a synthesizer may be missing.

        Raises:
            CheckpointMismatchError: when one is.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        missing = sorted(key for key in info["missing_keys"] if ".synthesizer." in key)
        if missing:
            raise CheckpointMismatchError(
                f"The checkpoint {pretrained_model_name_or_path!r} lacks {len(missing)} tensors of its synthesizers, "
                f"among them {missing[0]!r}; its config.json promises them. If it is a stock checkpoint, load it with "
                f"the stock class and patch it with patch_model(); else save it again from the patched model."
            )
        return (model, info) if wants_info else model


def stock_models(modeling: ModuleType, abstract: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    """The concrete model classes that a modeling module defines."""
    return [
        cls
        for cls in vars(modeling).values()
        if isinstance(cls, type)
        and issubclass(cls, abstract)
        and cls is not abstract
        and cls.__module__ == modeling.__name__
    ]


def synthesizer_models(
    module_name: str, stock: list[type[PreTrainedModel]], config_class: type[PreTrainedConfig]
) -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    """A subclass `SynthesizerXxx` of each stock class, importable (and so picklable) from the given module."""
    models = {}
    for cls in stock:
        name = f"Synthesizer{cls.__name__}"
        namespace = {"__module__": module_name, "__doc__": f"{cls.__name__} with synthesized self-attention."}
        models[cls] = type(name, (SynthesizerModelMixin, cls), {**namespace, "config_class": config_class})
        setattr(sys.modules[module_name], name, models[cls])
    return models
