"""Models that rotate queries and keys: Llama and its many relatives, and the rotary encoders. Values are not rotated.

The signatures differ only in the order of their parameters. A layer that compares no tokens ignores the rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin

Rotation = tuple[torch.Tensor, torch.Tensor]


class ClippedValues(SynthesizerMixin):
    """Some models clip their queries, keys and values (OLMo, `clip_qkv`)."""

    knows = frozenset({"clip_qkv", "clamp_", "clamp"})
    counts_from_padding = True

    def project_values(self, hidden_states: torch.Tensor) -> torch.Tensor:
        value = super().project_values(hidden_states)
        clip = getattr(self.config, "clip_qkv", None)
        return value if clip is None else value.clamp(min=-clip, max=clip)


@register_layer
class RotaryDecoderLayer(ClippedValues):
    """Llama, Mistral, Qwen2 and 3, Gemma 1 to 3, OLMo, Phi, SmolLM3, Granite, Cohere: grouped values, sliding windows."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class MaskFirstDecoderLayer(ClippedValues):
    """Granite's mixtures of experts, Mimi."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class PositionedDecoderLayer(ClippedValues):
    """Qwen2-VL: positions by name."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(
            hidden_states, attention_mask, past_key_values, position_ids=position_ids, **kwargs
        )


@register_layer
class StableLmLayer(ClippedValues):
    """StableLM, Chameleon."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(
            hidden_states, attention_mask, past_key_values, position_ids=position_ids, **kwargs
        )


@register_layer
class RotaryEncoderLayer(SynthesizerMixin):
    """ModernBERT: one projection for queries, keys and values."""

    knows = frozenset({"Wqkv", "Wo", "out_drop", "unbind", "deterministic_flash_attn"})

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)


@register_layer
class MaskFirstEncoderLayer(SynthesizerMixin):
    """NomicBERT, Jina, GTE, DINOv3; DETR, whose positions are added to queries and keys."""

    knows = frozenset({"apply_rotary_pos_emb_vision"})

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)
