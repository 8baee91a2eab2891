"""Under which names tensors stand in checkpoints. Transformers converts the names of many models between memory and checkpoint,
so that each release reads the checkpoints of all others; a patched model's stock tensors are converted as the stock model's.
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
"""Whether a checkpoint is read that has the names of memory: old ones of ours, of models whose names Transformers converts."""


def convert_as_stock(stock: type[PreTrainedModel], patched: type[PreTrainedModel]) -> None:
    """Let Transformers convert the tensors of a patched class as those of its stock class, where it goes by the class's name.

    Where it goes by the model type, it asks the config, which answers as the stock one's.
    """
    conversions = None if stock.is_custom_code() else get_checkpoint_conversion_mapping(stock.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(patched.__name__, conversions, overwrite=True)
        USER_REGISTERED_MAPPINGS.discard(patched.__name__)  # `is_custom_code` alone says whether they are used


class BesideLayers(WeightConverter):
    """A conversion such as that of queries, keys and values into one tensor, which leaves patched layers alone.

    A patched layer has no queries and keys to be joined with its values, and its guard must be seen. So its tensors stand in the
    checkpoint one by one. Loading finds them there as it is.
    """

    __slots__ = ("layers",)
    layers: tuple[str, ...]

    @classmethod
    def of(cls, conversion: WeightTransform, layers: tuple[str, ...]) -> WeightTransform:
        """The same conversion, but for tensors whose names start so."""
        if not isinstance(conversion, WeightConverter) or conversion.quantization_operation is not None:
            return conversion
        own = cls(*patterns_of(conversion), list(conversion.operations))
        own.scope_prefix, own.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
        own.layers = layers
        return own

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
    """Within it, saving gives tensors of these names the names that they have in stock checkpoints.

    Where these could not be read again, they stay as they are in memory.
    """
    before = conversions_of(model)
    conversions = before
    if (
        not before
    ):  # as Transformers takes them where the model was not loaded, or from a checkpoint of names as in memory
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    layers = tuple(f"{name}." for name, _ in synthesized_layers(model))
    conversions = [BesideLayers.of(conversion, layers) for conversion in conversions or ()]
    set_conversions(model, conversions if _are_read_again(model, conversions, names) else [])
    try:
        yield
    finally:
        set_conversions(model, before)


def has_names_of_memory(model: PreTrainedModel, info: dict[str, Any]) -> bool:
    """Whether a checkpoint that was loaded had the names of memory, which the conversion has spoilt: a tensor that is missing was
    there, and what became of it has no place."""
    if not info["missing_keys"] or not info["unexpected_keys"]:
        return False
    conversions = get_model_conversion_mapping(model)
    return any(_renamed(conversions, name)[0] in info["unexpected_keys"] for name in info["missing_keys"])


@contextmanager
def names_of_memory() -> Iterator[None]:
    """Within it, names in checkpoints are taken as they are."""
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
    """The new name, and what conversion of several tensors it takes part in, if any."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    return rename_source_key(name, renamings, converters, base_model_prefix, present, reverse)
