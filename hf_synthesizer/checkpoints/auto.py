"""Which Auto classes load a patched model, with this package imported or through the checkpoint's shim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..layers.patched import patched_class
from ..upstream.transformers_names import class_name_in, model_mapping
from ..version import HOW_TO_INSTALL
from .whole_files import write_whole

SHIM = Path(__file__).parent / "shims" / "modeling_hf_synthesizer.py"
"""The one file of code in a checkpoint, through which `trust_remote_code=True` finds the installed package."""


@contextmanager
def auto_map(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model's config names the shim as the source of its classes, for the `config.json` of a checkpoint.

    Entries for tokenizers and processors stay. Those of a base model's own remote code go, because they would build the base
    model.
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
    """The names of the Auto classes that load this model, with the one for documentation first."""
    config_class, cls = type(model.config), patched_class(model)
    names = [
        auto_class.__name__
        for auto_class in auto_model_classes()
        if class_name_in(auto_class, config_class) == cls.__name__
    ]
    return sorted(names, key=lambda name: name in ("AutoModelForPreTraining", "AutoModelForTextEncoding"))


def write_shim(folder: Path) -> None:
    """Write the shim into a checkpoint's folder, with the words how to install this package."""
    text = SHIM.read_text(encoding="utf-8").replace("{{ how_to_install }}", HOW_TO_INSTALL)
    write_whole(folder / SHIM.name, text)


def auto_model_classes() -> Iterator[Any]:
    """Transformers' Auto classes for models."""
    for auto_class in vars(modeling_auto).values():
        if isinstance(auto_class, type) and model_mapping(auto_class) is not None:
            yield auto_class
