"""What Transformers' Auto classes have to know of patched models, with the plugin imported and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from ..errors import CheckpointMismatchError
from ..version import HOW_TO_INSTALL, __version__
from .model_mixin import patched_class
from .whole_files import write_whole

SHIM = Path(__file__).parent / "shims" / "modeling_hf_synthesizer.py"
"""The one file of code in a checkpoint, through which `trust_remote_code=True` finds the installed package."""


def register_auto_classes(stock_config: type[PreTrainedConfig], config_class: type[PreTrainedConfig]) -> None:
    """Register the patched classes of a model type with each Auto class that serves the stock classes."""
    from ..models import model_class

    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    # Transformers calls this when a checkpoint was loaded with trust_remote_code. Its answer is to copy the module of
    # the class into every later checkpoint; ours carry the shim instead.
    config_class.register_for_auto_class = classmethod(lambda cls, auto_class="AutoConfig": None)  # type: ignore
    for auto_class in _auto_model_classes():
        mapping = auto_class._model_mapping
        if stock_config not in mapping:
            continue
        stock = mapping[stock_config]
        # A few model types have several classes for one task, and choose by the config.
        patched = model_class(stock[0] if isinstance(stock, (tuple, list)) else stock)
        if patched.config_class is not config_class:
            continue  # a class for the text part alone, which has a config, and an entry, of its own (Llama 4)
        auto_class.register(config_class, patched, exist_ok=True)
        # Pipelines and the Trainer's model card look classes up by name.
        mapping._model_mapping.setdefault(config_class.model_type, patched.__name__)
    for mapping in INPUTS:
        _answer_as_stock(mapping, stock_config, config_class)


INPUTS = (
    TOKENIZER_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    VIDEO_PROCESSOR_MAPPING,
    FEATURE_EXTRACTOR_MAPPING,
    PROCESSOR_MAPPING,
)
"""What `AutoTokenizer`, `AutoProcessor` and the like look up by the class of a config: a patched model takes what the stock one
takes."""


def _answer_as_stock(mapping: Any, stock_config: type[PreTrainedConfig], config_class: type[PreTrainedConfig]) -> None:
    """Let a mapping from config classes say of a patched class what it says of the stock one, and import nothing yet."""
    if stock_config in mapping._extra_content:  # from outside Transformers
        mapping.register(config_class, mapping._extra_content[stock_config], exist_ok=True)
        return
    own = mapping._reverse_config_mapping.get(stock_config.__name__)
    types = [model_type for model_type, name in mapping._config_mapping.items() if name == stock_config.__name__]
    # Several model types may have one config class; what counts is one that the mapping knows.
    known = [model_type for model_type in (own, *types) if model_type in mapping._model_mapping]
    if known:
        mapping._reverse_config_mapping[config_class.__name__] = known[0]


@contextmanager
def auto_map(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model's config says that the shim serves its classes: for the `config.json` of a checkpoint.

    Entries for tokenizers and processors stay; those of a base model's own remote code go, for they would build the
    base model.
    """
    config = model.config
    before = config.__dict__.get("auto_map")
    kept = {
        name: reference
        for name, reference in (before or {}).items()
        if not name.startswith(("AutoConfig", "AutoModel"))
    }
    served = dict.fromkeys(serving_auto_classes(model), patched_class(model))
    classes = {"AutoConfig": type(config), **served}
    config.auto_map = {**kept, **{name: f"{SHIM.stem}.{cls.__name__}" for name, cls in classes.items()}}
    try:
        yield
    finally:
        del config.auto_map
        if before is not None:
            config.auto_map = before


def serving_auto_classes(model: PreTrainedModel) -> list[str]:
    """The names of the Auto classes that build this model, the one to name in documentation first."""
    config_class, cls = type(model.config), patched_class(model)
    names = [
        auto_class.__name__
        for auto_class in _auto_model_classes()
        if auto_class._model_mapping._extra_content.get(config_class) is cls
    ]
    return sorted(names, key=lambda name: name in ("AutoModelForPreTraining", "AutoModelForTextEncoding"))


def write_shim(folder: Path) -> None:
    """Put the shim into a checkpoint's folder. It has to say how to install a package that may not be there to ask."""
    text = SHIM.read_text(encoding="utf-8").replace("{{ how_to_install }}", HOW_TO_INSTALL)
    write_whole(folder / SHIM.name, text)


def remote_class(name: str) -> type[PreTrainedConfig] | type[PreTrainedModel]:
    """The config or model class of that name: what the shim asks for.

    Raises:
        CheckpointMismatchError: when this version of the package has none.
    """
    from .. import models

    try:
        return getattr(models, name)
    except AttributeError as error:
        raise CheckpointMismatchError(
            f"The checkpoint's config.json asks for the class {name!r}, which hf_synthesizer {__version__} does not have. "
            f"Install a newer one ({HOW_TO_INSTALL}), or import the package that registers this model type first."
        ) from error


def _auto_model_classes() -> Iterator[Any]:
    """Transformers' Auto classes for models."""
    for auto_class in vars(modeling_auto).values():
        if isinstance(auto_class, type) and getattr(auto_class, "_model_mapping", None) is not None:
            yield auto_class
