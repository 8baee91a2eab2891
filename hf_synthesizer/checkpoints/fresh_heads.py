"""Finds heads whose weights are in no checkpoint. Transformers draws them at random, so their answers mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import InvalidConfigError
from .changes import Samples, changed_weights, sample_weights

_NOTE = "_synthesizer_fresh"


def remember_fresh(model: nn.Module, loading_info: Mapping[str, Any]) -> None:
    """Remember which weights of a model that was just loaded are in no checkpoint.

    Args:
        model: the model.
        loading_info: what `from_pretrained(..., output_loading_info=True)` returned beside it.
    """
    drawn = {*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])}
    model.__dict__[_NOTE] = {name: sample for name, sample in sample_weights(model).items() if name in drawn}


def fresh_weights(model: nn.Module) -> list[str]:
    """The names of the weights that were drawn at random when the model was loaded and that have not changed since.

    Empty for a model that was loaded without `remember_fresh`.
    """
    drawn: Samples = model.__dict__.get(_NOTE, {})
    return sorted(drawn.keys() - set(changed_weights(model, drawn)))


def require_trained_head(model: nn.Module, why: str) -> None:
    """Check that all weights of a model come from its checkpoint.

    Raises:
        InvalidConfigError: if some were drawn at random; the message begins with `why`.
    """
    drawn = fresh_weights(model)
    if drawn:
        raise InvalidConfigError(
            f"{why}, but the checkpoint of this {type(model).__name__} has no weights for {', '.join(drawn[:3])}"
            f"{'…' * (len(drawn) > 3)}: name a model that was fine-tuned on the task."
        )
