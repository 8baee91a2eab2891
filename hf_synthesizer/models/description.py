"""The field `synthesizer` of `config.json`: which layer has which synthesizer, and how it is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ..errors import CheckpointMismatchError, InvalidConfigError, SynthesizerError
from ..layers.finding.attention_layers import AttentionLayer
from ..layers.finding.projections import query_heads
from ..synthesizers.config import HeadGroupsConfig, LayerConfig, SynthesizerConfig, layer_config
from ..synthesizers.fingerprint import fingerprint
from ..version import HOW_TO_INSTALL
from .served import Served

FORMAT_VERSION = 1
KEYS = frozenset({"format_version", "configs", "layers", "forwards", "served_by", "base_model", "tower"})
"""Of a description. "tower" is written by `towers.py`, for one tower that is read from the checkpoint of the whole model."""
WHERE = "the field 'synthesizer' of config.json"

Rows = dict[str, list[Any]]

Plan = dict[str, LayerConfig]
"""From an attention layer's label to the configuration of its synthesizer."""


@dataclass(frozen=True)
class Description:
    """What `config.json` says of a patched model.

    Attributes:
        layers: by a layer's label what it is made of, but for what only a model knows: how many heads there are (`config_for_layer`).
        served: by a layer's label how it is served.
        depths: how many layers each stack has, those that are left stock included.
        is_tower: whether this is the part of a larger model's description that is about this tower.
    """

    layers: dict[str, SynthesizerConfig | list[SynthesizerConfig]]
    served: dict[str, Served]
    depths: dict[str, int]
    is_tower: bool = False

    def with_stacks(self, names: Mapping[str, str]) -> Description:
        """The same description where stacks have other names."""

        def renamed(labels: dict[str, Any]) -> dict[str, Any]:
            parts = {label: label.partition(".") for label in labels}
            return {f"{names[parts[label][0]]}.{parts[label][2]}": value for label, value in labels.items()}

        depths = {names[stack]: depth for stack, depth in self.depths.items()}
        return Description(renamed(self.layers), renamed(self.served), depths, self.is_tower)


def plan_to_json(
    plan: Plan,
    attention_layers: list[AttentionLayer],
    served: Mapping[str, Served],
    base_model: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """For `config.json`: the distinct configurations, and for each stack which layer has which (null: stock; a list: groups of
    heads); and likewise the distinct ways in which layers are served.

    `base_model` is the Hub's name of the model that was patched; left out if None. `others` is a description whose stacks stay as
    they are, where the attention layers have none of them.
    """
    kept = {"configs": [], "forwards": [], "layers": {}, "served_by": {}, **(others or {})}
    configs: list[dict[str, Any]] = list(kept["configs"])
    forwards: list[dict[str, Any]] = list(kept["forwards"])
    present = {attention_layer.stack for attention_layer in attention_layers}
    layers, served_by = ({k: row for k, row in kept[n].items() if k not in present} for n in ("layers", "served_by"))
    for attention_layer in attention_layers:
        row, forward_row = (
            layers.setdefault(attention_layer.stack, []),
            served_by.setdefault(attention_layer.stack, []),
        )
        if attention_layer.label not in plan:
            row.append(None)
            forward_row.append(None)
            continue
        config = plan[attention_layer.label]
        groups = config.groups if isinstance(config, HeadGroupsConfig) else (config,)
        numbers = [_number(group.to_dict(), configs) for group in groups]
        row.append(numbers[0] if len(numbers) == 1 else numbers)
        forward_row.append(_number(served[attention_layer.label].to_json(), forwards))
    description = {
        "format_version": FORMAT_VERSION,
        "configs": configs,
        "layers": layers,
        "forwards": forwards,
        "served_by": served_by,
    }
    return description if base_model is None else {**description, "base_model": base_model}


def plan_from_json(data: Any) -> Description:
    """The inverse of `plan_to_json`.

    Raises:
        CheckpointMismatchError: for a newer format, an unknown key, or a description that contradicts itself.
    """
    if not isinstance(data, Mapping):
        raise CheckpointMismatchError(f"Expected a description of the patched layers in {WHERE}, found {data!r}.")
    _require_version(data.get("format_version"))
    unknown = sorted(data.keys() - KEYS)
    if unknown:
        raise CheckpointMismatchError(
            f"Unknown key {unknown[0]!r} in {WHERE}; upgrade hf_synthesizer ({HOW_TO_INSTALL}), or remove the key."
        )
    try:
        configs = [SynthesizerConfig.from_dict(config) for config in data["configs"]]
        forwards = [Served.from_json(forward) for forward in data["forwards"]]
        layers = _by_label(data["layers"], lambda number: _one_or_more(configs, number))
        served = _by_label(data["served_by"], lambda number: _one(forwards, number))
        if served.keys() != layers.keys():
            raise TypeError("'served_by' and 'layers' name other layers")
        depths = {stack: len(row) for stack, row in data["layers"].items()}
    except SynthesizerError as error:
        raise CheckpointMismatchError(f"Cannot build what {WHERE} describes: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointMismatchError(f"{WHERE} is damaged ({type(error).__name__}: {error}).") from error
    return Description(layers, served, depths, "tower" in data)


def remember_fingerprints(folder: Any) -> None:
    """Compute the fingerprints of the layers that a folder's config.json describes, if there is one.

    If a user loads the folder with another config, the error can then say how the two differ.
    """
    with suppress(OSError, ValueError, AttributeError, SynthesizerError):  # loading tells what is wrong
        config = json.loads((Path(str(folder)) / CONFIG_NAME).read_text(encoding="utf-8"))
        for layer in plan_from_json(config.get("synthesizer")).layers.values():
            fingerprint(layer)


def _require_version(version: Any) -> None:
    if isinstance(version, int) and not isinstance(version, bool) and version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    remedy = f"Upgrade it: {HOW_TO_INSTALL}." if newer else "Save the checkpoint again from the model."
    raise CheckpointMismatchError(
        f"{WHERE} has format_version {version!r}; this version of hf_synthesizer reads {FORMAT_VERSION}. {remedy}"
    )


def _number(entry: dict[str, Any], entries: list[dict[str, Any]]) -> int:
    """Where the entry is in the list, to which it is added if need be."""
    if entry not in entries:
        entries.append(entry)
    return entries.index(entry)


def _by_label(rows: Mapping[str, Any], value: Callable[[Any], Any]) -> dict[str, Any]:
    """What the numbers in the rows of all stacks stand for, by the label of the layer."""
    return {
        f"{stack}.{index}": value(number)
        for stack, row in rows.items()
        for index, number in enumerate(row)
        if number is not None
    }


def _one(entries: list[Any], number: Any) -> Any:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"{number!r} is no number of an entry, which are counted from 0")
    return entries[number]


def _one_or_more(entries: list[Any], number: Any) -> Any:
    if not isinstance(number, list):
        return _one(entries, number)
    if not number:
        raise TypeError("a layer has an empty list of groups of heads")
    return [_one(entries, single) for single in number]


def config_for_layer(
    asked: SynthesizerConfig | Sequence[SynthesizerConfig], attention_layer: AttentionLayer
) -> LayerConfig:
    """What a layer is made of, held against the heads that it has.

    Raises:
        InvalidConfigError: for heads that it does not have, or that are named twice; the layer is named.
    """
    if isinstance(asked, SynthesizerConfig) and asked.heads is None:
        return asked
    try:
        return layer_config(asked, query_heads(attention_layer.module))
    except InvalidConfigError as error:
        raise InvalidConfigError(f"Layer {attention_layer.label!r}: {error}") from error
