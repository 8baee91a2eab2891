"""Heads whose weights are in no checkpoint: Transformers draws them at random, and what they answer means nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..patching.changes import Samples, changed_weights, sample_weights

_NOTE = "_synthesizer_fresh"


def remember_fresh(model: nn.Module, loading_info: Mapping[str, Any]) -> None:
    """Note which weights of a model that was just loaded come from no checkpoint.

    Args:
        model: the model.
        loading_info: what `from_pretrained(..., output_loading_info=True)` returned beside it.
    """
    drawn = {*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])}
    model.__dict__[_NOTE] = {name: sample for name, sample in sample_weights(model).items() if name in drawn}


def fresh_weights(model: nn.Module) -> list[str]:
    """The names of the weights that were drawn at random when the model was loaded and that nothing has trained since.

    Empty for a model that was loaded without `remember_fresh`, of which nobody knows.
    """
    drawn: Samples = model.__dict__.get(_NOTE, {})
    return sorted(drawn.keys() - set(changed_weights(model, drawn)))
