"""The longest sequence that a model takes: a stock model says it in its config, a patched one by its synthesizers.

A sequence may be tokens of text, patches of an image or frames of audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InvalidConfigError
from ..synthesizers import Synthesizer
from .finding.attention_layers import AttentionLayer, find_attention_layers
from .patched import synthesized_layers

TEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "max_seq_length")
OF_STACK = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
EXTRA_TOKENS = 2
"""An image may have a class token and a distillation token beside its patches."""
BESIDE_PATCHES = (
    "num_register_tokens",
    "num_registers",
    "num_detection_tokens",
    "num_queries",
    "num_cls_tokens",
    "n_cls_tokens",
)
"""Numbers of further tokens beside the patches (DINOv2 with registers, RADIO, YOLOS, EoMT, Pixio)."""
PACKED = ("pixtral",)
"""Types that read the patches of all images as one sequence: no config says how long it is."""
RELATIVE = dict.fromkeys(("t5", "mt5", "longt5", "switch_transformers", "udop", "pop2piano", "umt5"), 512)
"""T5 and its relatives know only relative positions. This is the length at which their checkpoints were trained."""
READS_TEXT = re.compile("text|language|decoder|lm")
"""In the names of the stack that reads text, in models of several stacks."""


def longest_sequence(config: PreTrainedConfig, stack: str = "encoder") -> int:
    """The longest sequence N of one stack of a stock model.

    Args:
        config: the attention module's own, which for one tower of a model is the tower's.
        stack: "encoder" or "decoder"; some configs have a maximum for each.

    Raises:
        InvalidConfigError: for a config that names none.
    """
    length = known_length(config, stack)
    if length is None:
        raise InvalidConfigError(
            f"{type(config).__name__} names no longest sequence (none of {', '.join(TEXT)}, and no image_size with "
            f"patch_size), so that the size of the position tables is unknown. Say it: patch_model(model, …, "
            f"max_length=1024), with the most tokens, patches or frames that one input will have."
        )
    return length


def known_length(config: PreTrainedConfig, stack: str = "encoder") -> int | None:
    """As `longest_sequence`; None for a config that names none."""
    of_stack = getattr(config, OF_STACK.get(stack, ""), None)
    if isinstance(of_stack, int) and of_stack > 0:
        return of_stack
    if config.model_type in RELATIVE:
        return getattr(config, "n_positions", RELATIVE[config.model_type])
    limit = position_limit(config)
    return _patches(config) if limit is None else limit


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions of text that a config names; None if it names none, or if positions are relative."""
    if config.model_type in RELATIVE:
        return None
    values = (getattr(config, name, None) for name in TEXT)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def config_of(attention_layer: AttentionLayer, model_config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that says how long a layer's sequences are: the layer's own (in a tower that of the tower), or the model's."""
    config = getattr(attention_layer.module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else model_config


def _patches(config: PreTrainedConfig) -> int | None:
    """The number of patches of an image or a video, and of the tokens beside them."""
    if config.model_type in PACKED:
        return None
    size, patch = _sides(getattr(config, "image_size", None)), _sides(getattr(config, "patch_size", None))
    if size is None or patch is None:
        return None
    count = 1
    for whole, part in zip(size[-2:], patch[-2:], strict=True):
        count *= max(1, -(-whole // part))
    frames = getattr(config, "num_frames", None)
    if isinstance(frames, int):
        count *= max(1, frames // int(getattr(config, "tubelet_size", 1)))
    return count + EXTRA_TOKENS + sum(int(getattr(config, name, 0) or 0) for name in BESIDE_PATCHES)


def _sides(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, Iterable) and not isinstance(value, (str, dict)):
        sides = [int(side) for side in value]
        return (sides[-2], sides[-1]) if len(sides) >= 2 else None
    return None


def max_length_of(model: nn.Module) -> int | None:
    """The least max_length among the synthesized layers of a model; None if none has one."""
    return _least(layer.synthesizer for _, layer in synthesized_layers(model))


def max_text_length(attention_layers: Iterable[AttentionLayer]) -> int | None:
    """The least max_length among the synthesized layers that read the model's text; None if none of them does.

    In an encoder-decoder the encoder reads it: a tokenizer does not truncate what the decoder writes. In a model of several
    towers the text tower reads it.
    """
    attention_layers = list(attention_layers)
    stacks = {layer.stack for layer in attention_layers}
    if "encoder" in stacks:
        stacks = {"encoder"}
    elif len(stacks) > 1:
        stacks = {stack for stack in stacks if READS_TEXT.search(stack)}
    return _least_max_length(layer for layer in attention_layers if layer.stack in stacks)


def max_generation_length(model: PreTrainedModel) -> int | None:
    """The least max_length among the synthesized layers that generate; None if none of them does. It counts the prompt.

    An encoder and the tower of another modality (LLaVA's images) do not generate. If a model has several stacks, the causal
    ones do.
    """
    attention_layers, _ = find_attention_layers(model)
    causal = [layer for layer in attention_layers if getattr(layer.module, "is_causal", False)]
    if model.config.is_encoder_decoder:
        causal = [layer for layer in attention_layers if layer.stack != "encoder"]
    return _least_max_length(causal or attention_layers)


def _least_max_length(attention_layers: Iterable[AttentionLayer]) -> int | None:
    return _least(layer.synthesizer for layer in attention_layers)


def _least(synthesizers: Iterable[Synthesizer | None]) -> int | None:
    """The least max_length of synthesizers; None if none of them has one."""
    lengths = (synthesizer.max_length for synthesizer in synthesizers if synthesizer is not None)
    return min((length for length in lengths if length), default=None)
