"""Registers patched classes with Transformers' Auto classes, and finds the classes that a checkpoint asks for."""

from __future__ import annotations

import importlib

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from ..checkpoints.auto import auto_model_classes
from ..errors import CheckpointMismatchError
from ..layers.finding.stock_classes import CLASSES, PREFIX
from ..upstream.transformers_names import model_mapping, name_model_class, share_entry
from ..version import HOW_TO_INSTALL, __version__


def register_auto_classes(stock_config: type[PreTrainedConfig], config_class: type[PreTrainedConfig]) -> None:
    """Register the patched classes of a model type, by name, with each Auto class that loads the stock classes.

    No patched class is made: Transformers takes it from `hf_synthesizer.models` when it needs it, and that makes it.
    """
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    # Transformers calls this when a checkpoint was loaded with trust_remote_code. Its answer is to copy the module of
    # the class into every later checkpoint; ours carry the shim instead.
    config_class.register_for_auto_class = classmethod(lambda cls, auto_class="AutoConfig": None)  # type: ignore
    for auto_class in auto_model_classes():
        mapping = model_mapping(auto_class)
        if stock_config not in mapping:
            continue
        stock = mapping[stock_config]
        # A few model types have several classes for one task, and choose by the config.
        stock = stock[0] if isinstance(stock, (tuple, list)) else stock
        if stock.config_class is not stock_config:
            continue  # a class for the text part alone, which has a config, and an entry, of its own (Llama 4)
        name = PREFIX + stock.__name__
        if not name_model_class(mapping, config_class, name, CLASSES):
            auto_class.register(config_class, getattr(importlib.import_module(CLASSES), name), exist_ok=True)
    for mapping in INPUTS:
        share_entry(mapping, stock_config, config_class)


INPUTS = (
    TOKENIZER_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    VIDEO_PROCESSOR_MAPPING,
    FEATURE_EXTRACTOR_MAPPING,
    PROCESSOR_MAPPING,
)
"""The mappings from config classes to tokenizers and processors. A patched model takes the same as the stock one."""


def remote_class(name: str) -> type[PreTrainedConfig] | type[PreTrainedModel]:
    """The config or model class of that name, for the shim.

    Raises:
        CheckpointMismatchError: when this version of the package has none.
    """
    try:
        return getattr(importlib.import_module(CLASSES), name)
    except AttributeError as error:
        raise CheckpointMismatchError(
            f"The checkpoint's config.json asks for the class {name!r}, which hf_synthesizer {__version__} does not have. "
            f"Install a newer one ({HOW_TO_INSTALL}), or import the package that registers this model type first."
        ) from error
