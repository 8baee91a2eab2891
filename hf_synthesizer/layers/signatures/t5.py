"""T5's forward signature: T5, mT5, LongT5, Switch Transformers, UDOP, Pop2Piano."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin
from ..refusals import require_no_other_states


@register_layer
class T5Layer(SynthesizerMixin):
    """Self-attention with synthesized logits. The relative position bias stays, added to them.

    T5 knows only relative positions, so padding on the left must change nothing.
    """

    serves_dot_product = True
    counts_from_padding = True
    knows = frozenset(
        [
            "n_heads",
            "has_relative_attention_bias",
            "compute_bias",
            "gradient_checkpointing",
            "requires_grad",
            "zeros",
            "device",
            "get_seq_length",
            "clone",
            "Tensor",
        ]
    )

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        require_no_other_states(key_value_states)
        is_causal = kwargs.pop("is_causal", None)
        self.require_backend(mask, **kwargs)
        length = hidden_states.shape[1]
        tokens = self.update_cache(hidden_states, past_key_values)
        key_length = tokens.length
        positions = self.positions(None, mask, length, key_length, tokens.before)
        if position_bias is None:
            # Layers share the bias: the first one computes it and passes it on, patched or not.
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(  # type: ignore[operator]
                    length, key_length, device=hidden_states.device, past_seen_tokens=tokens.before
                )
            else:
                position_bias = hidden_states.new_zeros(1, self.dimensions[1], length, key_length, dtype=tokens.dtype)
        output, weights = self.attend_to_tokens(tokens, hidden_states, mask, positions, position_bias, is_causal)
        return self.project_output(output, hidden_states), position_bias, weights
