"""One tower of a larger model, built from the checkpoint of the whole: which of the described layers are its own.

A description calls stacks as the whole model does ("vision_model", "text_model"). A part has fewer of them, and may call its only
one otherwise ("encoder").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointMismatchError
from ..layers.finding.attention_layers import AttentionLayer


class TowerConfig:
    """Mixed into the config class of each tower: read from the whole's `config.json`, it keeps the tower's own description."""

    base_config_key: str
    model_type: str

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As Transformers' own, which goes on to read the tower's part of the dict.

        Raises:
            CheckpointMismatchError: where the description does not say which stack is this tower.
        """
        values, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]
        part, description = values.get(cls.base_config_key), values.get("synthesizer")
        if cls.base_config_key and isinstance(part, dict) and isinstance(description, Mapping):
            values_of_tower = {
                "model_type": cls.model_type,
                "synthesizer": _of_tower(description, cls.base_config_key),
            }
            values = {**values, cls.base_config_key: {**part, **values_of_tower}}
        return values, rest


def _of_tower(description: Mapping[str, Any], key: str) -> dict[str, Any]:
    layers = description.get("layers")
    stacks = list(layers) if isinstance(layers, Mapping) else []
    stacks_of_tower = [stack for stack in stacks if stack.startswith(key.removesuffix("_config"))]
    if not isinstance(layers, Mapping) or len(stacks_of_tower) != 1:
        raise CheckpointMismatchError(
            f"The checkpoint is of a larger model, whose stacks are {', '.join(stacks) or 'not described'}, and none of them "
            f"alone is that of its {key!r}. Load the whole model with its own class, and take the part from it."
        )
    rows = {key: description[key] for key in ("layers", "served_by") if isinstance(description.get(key), Mapping)}
    rows = {
        name: {stacks_of_tower[0]: row[stacks_of_tower[0]]} for name, row in rows.items() if stacks_of_tower[0] in row
    }
    return {**description, **rows, "tower": key}


def stacks_here(
    described: Iterable[str], attention_layers: Iterable[AttentionLayer], *, is_tower: bool
) -> dict[str, str]:
    """From the name of each stack in a description to its name in this model, which may be a part of the described one.

    A stack that this model does not have keeps its name.

    Args:
        described: the stacks of the description, patched or not.
        attention_layers: the layers of this model.
        is_tower: whether the description was cut down to the one tower that this model is.

    Raises:
        CheckpointMismatchError: where none of the part's stacks is described.
    """
    described, here = list(described), {layer.stack: layer for layer in attention_layers}
    names = {stack: stack for stack in described}
    for stack, layer in here.items():
        if stack in described:
            continue
        candidates = [name for name in described if name in layer.name.split(".")]
        if not candidates and is_tower and len(described) == len(here) == 1:
            candidates = described
        if len(candidates) == 1:
            names[candidates[0]] = stack
    if described and here and not here.keys() & set(names.values()):
        raise CheckpointMismatchError(
            f"config.json describes the stacks {', '.join(described)}, but this model has {', '.join(here)} and none of those: it "
            f"is the checkpoint of another model, or of a larger one. Load it with the class that its 'architectures' name, and "
            f"take the part from that model."
        )
    return names
