"""Whether what `generate` is asked for fits into the tables of a patched model: better known at the start than after the last
token that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import SequenceTooLongError
from ..layers.patched import max_generation_length

NAMED = "_synthesizer_names_length"
"""On the configuration of one call: whether its caller said how many tokens to generate."""


def names_length(model: PreTrainedModel, generation_config: Any, has_default_max_length: bool) -> bool:
    """Whether a caller of `generate` says how long the answer is, and not the model's own settings alone."""
    own, asked = model.generation_config, generation_config
    if asked.max_new_tokens is not None:
        return own is None or asked.max_new_tokens != own.max_new_tokens
    return not has_default_max_length and (own is None or asked.max_length != own.max_length)


def require_room(model: PreTrainedModel, model_inputs: Mapping[str, Any], tokens: int) -> None:
    """Whether the model has room for all tokens that a call of `generate` will let it read.

    Args:
        model: a patched model.
        model_inputs: of its first step.
        tokens: how many it reads in all, padding included: the prompt, and what is generated but the last.

    Raises:
        SequenceTooLongError: where it has not.
    """
    room = max_generation_length(model)
    if room is None or tokens <= room:
        return
    mask = model_inputs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        longest = int(mask.long().sum(-1).max())
        tokens -= mask.shape[-1] - longest
        positions = model_inputs.get("position_ids")
        if isinstance(positions, torch.Tensor) and int(positions[..., -1].max()) != longest - 1:
            return  # the caller's own, of which every step looks at those that it gets
    if tokens > room:
        raise SequenceTooLongError(
            f"generate() is asked for up to {tokens + 1} tokens, prompt included, but the synthesized layers of this "
            f"{type(model).__name__} were built for N = max_length = {room} positions: {tokens - room} too few. Ask for so many "
            f"fewer (max_new_tokens or max_length), shorten the prompt, or patch the model again with "
            f"patch_model(..., max_length={tokens}) and train it."
        )
