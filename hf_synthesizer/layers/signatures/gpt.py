"""The GPT models, each with a forward of its own: GPT-2, OPT, GPT-NeoX."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin
from ..refusals import require_no_other_states


@register_layer
class Gpt2Layer(SynthesizerMixin):
    """GPT-2: one projection `c_attn`, with its weight transposed, for queries, keys and values."""

    knows = frozenset(
        [
            "c_attn",
            "c_proj",
            "q_attn",
            "hasattr",
            "split",
            "split_size",
            "attn_dropout",
            "resid_dropout",
            "reorder_and_upcast_attn",
            "_upcast_and_reordered_attn",
        ]
    )
    counts_from_padding = True
    compares_some_heads = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_no_other_states(encoder_hidden_states)
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class OptLayer(SynthesizerMixin):
    """OPT."""

    counts_from_padding = True
    compares_some_heads = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class GptNeoXLayer(SynthesizerMixin):
    """GPT-NeoX and Pythia: one projection `query_key_value`, head by head."""

    knows = frozenset({"query_key_value", "head_size", "chunk"})
    counts_from_padding = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        layer_past: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, layer_past, **kwargs)
