"""Checks before `generate` starts that all tokens will fit into the tables of a patched model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import SequenceTooLongError
from ..layers.lengths import max_generation_length

LENGTH_REQUESTED = "_synthesizer_length_requested"
"""An attribute of the generation config of one call: whether its caller gave the length of the answer."""


def requests_length(model: PreTrainedModel, generation_config: Any, has_default_max_length: bool) -> bool:
    """Whether the caller of `generate` gives the length of the answer. If not, it comes from the model's generation config."""
    default = model.generation_config
    if generation_config.max_new_tokens is not None:
        return default is None or generation_config.max_new_tokens != default.max_new_tokens
    return not has_default_max_length and (default is None or generation_config.max_length != default.max_length)


def require_generation_length(model: PreTrainedModel, model_inputs: Mapping[str, Any], tokens: int) -> None:
    """Check that a model can read all tokens of a call of `generate`.

    Args:
        model: a patched model.
        model_inputs: the inputs of the first step.
        tokens: the number of tokens that the model reads: the prompt with its padding, and all generated tokens but the last.

    Raises:
        SequenceTooLongError: if it cannot.
    """
    available = max_generation_length(model)
    if available is None or tokens <= available:
        return
    mask = model_inputs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        longest = int(mask.long().sum(-1).max())
        tokens -= mask.shape[-1] - longest
        positions = model_inputs.get("position_ids")
        if isinstance(positions, torch.Tensor) and int(positions[..., -1].max()) != longest - 1:
            return  # the caller counts positions; each step checks them
    if tokens > available:
        raise SequenceTooLongError(
            f"generate() is asked for up to {tokens + 1} tokens, prompt included, but the synthesized layers of this "
            f"{type(model).__name__} were built for N = max_length = {available} positions, {tokens - available} too few. Ask for fewer "
            f"tokens (max_new_tokens or max_length), shorten the prompt, or patch the model again with "
            f"patch_model(..., max_length={tokens}) and train it."
        )
