"""The names of tensors in checkpoints.

Transformers converts the names of many models between memory and checkpoint, so that each release reads the checkpoints of all
others. The stock tensors of a patched model are converted as those of the stock model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from ..layers.patched import synthesized_layers
from ..upstream.transformers_names import conversions_of, patterns_of, set_conversions

AS_IN_MEMORY: ContextVar[bool] = ContextVar("AS_IN_MEMORY", default=False)
"""Whether the names in a checkpoint are those in memory, as `save_pretrained(save_original_format=False)` writes them."""


def convert_as_stock(stock: type[PreTrainedModel], patched: type[PreTrainedModel]) -> None:
    """Let Transformers convert the tensors of a patched class as those of its stock class, if it looks up the class by name.

    If it looks up the model type, it asks the config, which answers as the stock config.
    """
    conversions = None if stock.is_custom_code() else get_checkpoint_conversion_mapping(stock.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(patched.__name__, conversions, overwrite=True)
        USER_REGISTERED_MAPPINGS.discard(patched.__name__)  # `is_custom_code` alone says whether they are used


class BesideLayers(WeightConverter):
    """A conversion, such as that of queries, keys and values into one tensor, that skips patched layers.

    A patched layer has no queries and keys to join with its values, and its guard must have a name of its own. So the checkpoint
    has its tensors one by one, and loading finds them there.
    """

    __slots__ = ("layers",)
    layers: tuple[str, ...]

    @classmethod
    def of(cls, conversion: WeightTransform, layers: tuple[str, ...]) -> WeightTransform:
        """The same conversion, except for tensors whose names start with one of `layers`."""
        if not isinstance(conversion, WeightConverter) or conversion.quantization_operation is not None:
            return conversion
        copied = cls(*patterns_of(conversion), list(conversion.operations))
        copied.scope_prefix, copied.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
        copied.layers = layers
        return copied

    def reverse_transform(self) -> WeightTransform:
        """For saving."""
        reverse: Any = super().reverse_transform()
        reverse.layers = self.layers
        return reverse

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """As Transformers', unless the tensor belongs to one of the layers."""
        return (source_key, None) if source_key.startswith(self.layers) else super().rename_source_key(source_key)


@contextmanager
def stock_names(model: PreTrainedModel, names: list[str]) -> Iterator[None]:
    """Within it, tensors of these names are saved under the names of stock checkpoints.

    If these could not be read again, the names stay as they are in memory.
    """
    before = conversions_of(model)
    conversions = before
    if (
        not before
    ):  # as Transformers takes them where the model was not loaded, or from a checkpoint of names as in memory
        default = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in default if not isinstance(conversion, PrefixChange)]
    layers = tuple(f"{name}." for name, _ in synthesized_layers(model))
    conversions = [BesideLayers.of(conversion, layers) for conversion in conversions or ()]
    set_conversions(model, conversions if _are_read_again(model, conversions, names) else [])
    try:
        yield
    finally:
        set_conversions(model, before)


def has_names_of_memory(model: PreTrainedModel, info: dict[str, Any]) -> bool:
    """Whether a loaded checkpoint had the names of memory, and the conversion has spoilt them.

    Then a tensor is missing, and the name to which the conversion turns it is one without a place.
    """
    if not info["missing_keys"] or not info["unexpected_keys"]:
        return False
    conversions = get_model_conversion_mapping(model)
    return any(_renamed(conversions, name)[0] in info["unexpected_keys"] for name in info["missing_keys"])


@contextmanager
def names_of_memory() -> Iterator[None]:
    """Within it, names in checkpoints are not converted."""
    token = AS_IN_MEMORY.set(True)
    try:
        yield
    finally:
        AS_IN_MEMORY.reset(token)


def _are_read_again(model: PreTrainedModel, conversions: list[WeightTransform], names: list[str]) -> bool:
    if not conversions:
        return True
    backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    forwards = get_model_conversion_mapping(model)
    present: dict[str, Any] = dict.fromkeys(names, True)
    for name in names:
        saved, joined = _renamed(backwards, name, reverse=True)
        if joined is None and _renamed(forwards, saved, model.base_model_prefix, present)[0] != name:
            return False
    return True


def _renamed(
    conversions: list[WeightTransform],
    name: str,
    base_model_prefix: str | None = None,
    present: dict[str, Any] | None = None,
    reverse: bool = False,
) -> tuple[str, str | None]:
    """The new name, and the conversion of several tensors that it belongs to, if any."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    return rename_source_key(name, renamings, converters, base_model_prefix, present, reverse)
