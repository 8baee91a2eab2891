"""How long the sequences of a patch are: the model's own maximum where the user names none, if that is affordable."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..errors import InvalidConfigError
from ..layers.finding.attention_layers import AttentionLayer
from ..layers.finding.projections import find_projection_names, head_dim, in_features, query_heads
from ..layers.lengths import known_length, longest_sequence
from ..synthesizers import build_synthesizer
from ..synthesizers.config import LayerConfig

logger = logging.get_logger(__name__)

LARGE = 10**9
"""Bytes of position tables which nobody is asked about, however small the model is."""


def with_lengths(
    attention_layers: list[AttentionLayer],
    plan: dict[str, LayerConfig],
    model: nn.Module,
    model_config: PreTrainedConfig,
) -> dict[str, LayerConfig]:
    """The plan, with the model's own longest sequence for each layer that names none.

    A `max_length` beyond what the model can take is warned of: no input will use it.

    Raises:
        InvalidConfigError: for a model that names no longest sequence, and where the position tables for it would be larger
            than the whole model, and larger than `LARGE`.
    """
    filled: dict[str, LayerConfig] = {}
    unnamed: list[tuple[nn.Module, LayerConfig, int]] = []
    longest: tuple[int, str] = (0, "")
    for attention_layer in attention_layers:
        if attention_layer.label not in plan:
            continue
        config, layer_config = plan[attention_layer.label], config_of(attention_layer, model_config)
        if config.max_length is None:
            own = longest_sequence(layer_config, attention_layer.stack)
            unnamed.append((attention_layer.module, config, own))
            config = config.for_length(own)
            longest = max(longest, (own, type(layer_config).__name__))
        else:
            _warn_beyond(
                config.max_length, known_length(layer_config, attention_layer.stack), type(layer_config).__name__
            )
        filled[attention_layer.label] = config
    _require_affordable(model, unnamed, *longest)
    return filled


def _require_affordable(
    model: nn.Module, layers: list[tuple[nn.Module, LayerConfig, int]], longest: int, name: str
) -> None:
    """Raise `InvalidConfigError` where tables for each layer's longest sequence are too large, with a length for which they are not."""

    def count(length: int) -> int:
        return sum(_numbers(module, config.for_length(min(length, own))) for module, config, own in layers)

    width = next((parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point()), 4)
    size = _size(model)
    numbers, allowed = count(longest), max(size, LARGE // width)
    if numbers > allowed:
        powers = (2**power for power in range(longest.bit_length() - 1, 0, -1))
        length = next((length for length in powers if length < longest and count(length) <= allowed), 1)
        raise InvalidConfigError(
            f"{name} allows sequences of {longest:,} positions. Position tables for so many would hold {numbers:,} numbers "
            f"({numbers * width / 1e9:.1f} GB), and the whole model has {size:,} weights. Say how long your sequences are: "
            f"patch_model(model, …, max_length={length})."
        )


def config_of(attention_layer: AttentionLayer, model_config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that says how a layer's sequences are: its own, which in a tower of a larger model is the tower's."""
    own = getattr(attention_layer.module, "config", None)
    return own if isinstance(own, PreTrainedConfig) else model_config


def _warn_beyond(max_length: int, known: int | None, name: str) -> None:
    if known is not None and max_length > known:
        logger.warning_once(
            f"max_length={max_length:,} is more than the {known:,} positions that {name} can take: the position tables are "
            f"larger than any input can use."
        )


def _size(model: nn.Module) -> int:
    """How many weights a model has; a quantized projection may hold them in another form than parameters."""
    counted = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if hasattr(module, "out_features") and hasattr(module, "in_features") and not list(module.parameters()):
            counted += int(module.out_features) * int(module.in_features)  # type: ignore[arg-type]
    return counted


def _numbers(module: nn.Module, config: LayerConfig) -> int:
    """How many numbers, trained or not, the tables and projections of a synthesizer would have."""
    projection_names = find_projection_names(module)
    if projection_names is None:
        return 0
    hidden_size = in_features(module.get_submodule(projection_names.fused or projection_names.value))
    with torch.device("meta"):
        made = build_synthesizer(
            config, hidden_size, query_heads(module), config.max_length or 0, head_dim=head_dim(module)
        )
    return sum(tensor.numel() for tensor in (*made.parameters(), *made.buffers()))
