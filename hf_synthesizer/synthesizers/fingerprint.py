"""The fingerprint of a configuration: one number for all that decides what a layer computes with given weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .config import HeadGroupsConfig, LayerConfig, SynthesizerConfig
from .registry import variant_options

_DESCRIPTIONS: dict[int, dict[str, Any]] = {}
"""The description behind each fingerprint that this process has computed, so that an error can compare two of them."""


def fingerprint(config: LayerConfig | Sequence[SynthesizerConfig]) -> int:
    """A positive number of 48 bits, so that a float64 holds it: the same for the same function of the weights.

    It is the same on every machine and in every version: options at their defaults do not enter, and an option that a
    later version adds has the old behaviour as its default. A sequence stands for groups of heads.
    """
    description = describe(config)
    text = json.dumps(description, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") or 1
    _DESCRIPTIONS[number] = description
    return number


def describe(config: LayerConfig | Sequence[SynthesizerConfig]) -> dict[str, Any]:
    """The configuration as a dict, without options that only set the first weights."""
    if isinstance(config, SynthesizerConfig) and config.heads is None:
        return _describe_group(config)
    groups = config.groups if isinstance(config, HeadGroupsConfig) else config
    groups = [groups] if isinstance(groups, SynthesizerConfig) else sorted(groups, key=lambda group: group.heads or ())
    return {"groups": [_describe_group(group) for group in groups]}


def _describe_group(config: SynthesizerConfig) -> dict[str, Any]:
    options = variant_options(config.variant)
    return {
        name: value for name, value in config.to_dict().items() if name not in options or options[name].in_fingerprint
    }


def describe_difference(config: LayerConfig, number: int) -> str:
    """Say how the configuration with this fingerprint differs from `config`, as a sentence."""
    theirs, ours = _DESCRIPTIONS.get(number), describe(config)
    if theirs is None:
        return f"their fingerprint is {number}, here it is {fingerprint(config)}."
    if "groups" in theirs or "groups" in ours:
        return f"theirs is {theirs}."
    differences = [
        f"their {name} is {_value(theirs, name)!r}, here it is {_value(ours, name)!r}"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(differences) + "."


def _value(description: dict[str, Any], name: str) -> Any:
    option = variant_options(description["variant"]).get(name)
    return description.get(name, None if option is None else option.default)
