"""The config class of one tower of a larger model, which is read from the config.json of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointMismatchError


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
            own = {"model_type": cls.model_type, "synthesizer": _of_tower(description, cls.base_config_key)}
            values = {**values, cls.base_config_key: {**part, **own}}
        return values, rest


def _of_tower(description: Mapping[str, Any], key: str) -> dict[str, Any]:
    layers = description.get("layers")
    stacks = list(layers) if isinstance(layers, Mapping) else []
    own = [stack for stack in stacks if stack.startswith(key.removesuffix("_config"))]
    if not isinstance(layers, Mapping) or len(own) != 1:
        raise CheckpointMismatchError(
            f"The checkpoint is of a larger model, whose stacks are {', '.join(stacks) or 'not described'}, and none of them "
            f"alone is that of its {key!r}. Load the whole model with its own class, and take the part from it."
        )
    rows = {key: description[key] for key in ("layers", "served_by") if isinstance(description.get(key), Mapping)}
    return {**description, **{key: {own[0]: row[own[0]]} for key, row in rows.items() if own[0] in row}}
