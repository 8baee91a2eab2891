"""BART's forward signatures: BART, mBART, Marian, Pegasus, Blenderbot, M2M100; Whisper and Speech2Text; wav2vec2, HuBERT."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin
from ..refusals import require_no_other_states


@register_layer
class BartLayer(SynthesizerMixin):
    """Encoder and decoder. Cross-attention has the same stock class and gets `key_value_states`; it stays stock."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_no_other_states(key_value_states)
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class WhisperLayer(SynthesizerMixin):
    """BART's, with `output_attentions`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_no_other_states(key_value_states)
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)


@register_layer
class SpeechEncoderLayer(SynthesizerMixin):
    """Without a cache: wav2vec2, HuBERT, UniSpeech, SEW."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_no_other_states(key_value_states)
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)
