"""A base checkpoint, loaded and patched in one step."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..checkpoints.loaded_weights import align_in_memory
from ..errors import UnsupportedModelError
from .plan import Spec
from .selection import Layers
from .swap import patch_model


def from_pretrained_patched(
    pretrained_model_name_or_path: Any,
    model_class: Any,
    spec: Spec,
    /,
    *,
    layers: Layers = None,
    max_length: int | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """`model_class.from_pretrained(...)` of a stock checkpoint, then `patch_model(...)`.

    Every parameter is either the checkpoint's or initialised; the stock query and key projections are kept for
    `unpatch_model`.

    Args:
        pretrained_model_name_or_path: a stock checkpoint, on the Hub or in a folder.
        model_class: an Auto class such as `AutoModelForSequenceClassification`, or a stock model class.
        spec: a variant, a `SynthesizerConfig` or a hybrid, as `patch_model` takes it.
        layers: which layers, as for `patch_model`.
        max_length: the longest sequence N, as for `patch_model`.
        **kwargs: for `from_pretrained`: `num_labels`, `dtype`, `device_map`, `revision`, `variant` (of the file) …

    Raises:
        AlreadyPatchedError: for a checkpoint of a patched model, which `from_pretrained` alone loads.
        UnsupportedModelError: for a model that no model type serves, or whose weights were offloaded.
        and what `patch_model` raises.

    Example:
        >>> model = from_pretrained_patched(
        ...     "bert-base-uncased", AutoModelForSequenceClassification, "factorized_dense", num_labels=3
        ... )  # doctest: +SKIP
    """
    model = model_class.from_pretrained(pretrained_model_name_or_path, **kwargs)
    offloaded = next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None)
    if offloaded is not None:
        raise UnsupportedModelError(
            f"The device_map put {offloaded!r} out of memory, and a layer that is not in memory cannot be patched. Load "
            f"the model whole (device_map={{'': 'cpu'}}), save it patched, and give the device_map when you load that."
        )
    align_in_memory(model)
    return patch_model(model, spec, layers=layers, max_length=max_length)
