"""BERT's forward signature, which many models share: RoBERTa, XLM-R, CamemBERT, ELECTRA, ERNIE and more."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin


@register_layer
class BertLayer(SynthesizerMixin):
    """Queries, keys and values by name; the module around it projects the output."""

    serves_dot_product = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, past_key_values, **kwargs)
