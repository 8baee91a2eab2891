"""The longest sequence of each layer of a patch. If the user names none, it is the model's own, unless its tables are too large."""

from __future__ import annotations

import torch
from torch import nn
from transformers.utils import logging

from ..errors import InvalidConfigError
from ..layers.finding.attention_layers import AttentionLayer
from ..layers.finding.projections import find_projection_names, head_dim, in_features, query_heads
from ..layers.lengths import config_of, known_length, longest_sequence
from ..models.description import Plan
from ..synthesizers import build_synthesizer
from ..synthesizers.config import LayerConfig

logger = logging.get_logger(__name__)

LARGE = 10**9
"""Tables of up to so many bytes are made without asking, however small the model is."""

Unnamed = list[tuple[AttentionLayer, LayerConfig, int]]
"""Layers for which the user names no longest sequence, with the model's own."""


def with_lengths(attention_layers: list[AttentionLayer], plan: Plan, model: nn.Module) -> Plan:
    """The plan, with the model's own longest sequence for each layer that names none.

    Warns of a `max_length` beyond what the model can take, because no input will use it.

    Raises:
        InvalidConfigError: for a model that names no longest sequence, and for one whose position tables would be larger than
            the whole model, and larger than `LARGE`.
    """
    complete: Plan = {}
    unnamed: Unnamed = []
    for layer in attention_layers:
        if layer.label not in plan:
            continue
        config, stock_config = plan[layer.label], config_of(layer, model.config)  # type: ignore[arg-type]
        if config.lacks_length:
            unnamed.append((layer, config, longest_sequence(stock_config, layer.stack)))
            config = config.for_length(unnamed[-1][2])
        elif config.max_length is not None:
            known = known_length(stock_config, layer.stack)
            if known is not None and config.max_length > known:
                logger.warning_once(
                    f"max_length={config.max_length:,} is more than the {known:,} positions that {type(stock_config).__name__} "
                    f"can take: the position tables are larger than any input can use."
                )
        complete[layer.label] = config
    _require_affordable(model, unnamed)
    return complete


def _require_affordable(model: nn.Module, unnamed: Unnamed) -> None:
    """Raise `InvalidConfigError` if the tables are too large. The message names a length for which they are not."""
    width = next((parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point()), 4)
    if sum(_at_most(layer.module, config, length) for layer, config, length in unnamed) <= LARGE // width:
        return
    counted: dict[tuple, int] = {}

    def count(limit: int) -> int:
        """The numbers of all synthesizers if no sequence is longer than `limit`. Equal layers are counted once."""
        total = 0
        for layer, config, length in unnamed:
            sizes, shortened = _sizes(layer.module), config.for_length(min(length, limit))
            key = (*sizes, repr(shortened))
            if key not in counted:
                counted[key] = _numbers(*sizes, shortened)
            total += counted[key]
        return total

    longest, name = max(
        (length, type(config_of(layer, model.config)).__name__)  # type: ignore[arg-type]
        for layer, _, length in unnamed
    )
    size = _size(model)
    numbers, allowed = count(longest), max(size, LARGE // width)
    if numbers > allowed:
        powers = (2**power for power in range(longest.bit_length() - 1, 0, -1))
        affordable = next((length for length in powers if length < longest and count(length) <= allowed), 1)
        raise InvalidConfigError(
            f"{name} allows sequences of {longest:,} positions. Position tables for so many would hold {numbers:,} numbers "
            f"({numbers * width / 1e9:.1f} GB), and the whole model has {size:,} weights. Say how long your sequences are: "
            f"patch_model(model, …, max_length={affordable})."
        )


def _size(model: nn.Module) -> int:
    """The number of weights of a model. A quantized projection may hold them in another form than parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if hasattr(module, "out_features") and hasattr(module, "in_features") and not list(module.parameters()):
            count += int(module.out_features) * int(module.in_features)  # type: ignore[arg-type]
    return count


def _sizes(module: nn.Module) -> tuple[int, int, int]:
    """hidden_size, num_heads and head_dim of an attention layer; zeros if its projections have no known names."""
    names = find_projection_names(module)
    if names is None:
        return 0, 0, 0
    return in_features(module.get_submodule(names.fused or names.value)), query_heads(module), head_dim(module)


def _at_most(module: nn.Module, config: LayerConfig, length: int) -> int:
    """More numbers than the variants of the library need: each part has a table (H, N, N), factors (H, N, d) and projections."""
    hidden_size, heads, _ = _sizes(module)
    return (len(config.parts) + 1) * (heads * length + 2 * hidden_size) * (length + hidden_size)


def _numbers(hidden_size: int, heads: int, width: int, config: LayerConfig) -> int:
    """How many numbers, trained or not, the tables and projections of a synthesizer would have."""
    if not heads:
        return 0
    with torch.device("meta"):
        synthesizer = build_synthesizer(config, hidden_size, heads, config.max_length or 0, head_dim=width)
    return sum(tensor.numel() for tensor in (*synthesizer.parameters(), *synthesizer.buffers()))
