"""BERT: encoder, decoder, and every head of Transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig
from transformers.cache_utils import Cache
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertSelfAttention

from ..checkpoints.model_mixin import stock_models, synthesizer_models
from ..gemm import linear
from ..positions import Positions
from .mixin import SynthesizerMixin
from .registry import Family, register_family


class SynthesizerBertSelfAttention(SynthesizerMixin, BertSelfAttention):
    """`BertSelfAttention` with synthesized logits."""

    projections = ("query", "key")
    value_projection = "value"

    @staticmethod
    def default_max_length(config: BertConfig) -> int:
        return config.max_position_embeddings

    @property
    def dimensions(self) -> tuple[int, int, int]:
        return self.value.in_features, self.num_attention_heads, self.attention_head_size

    @property
    def dropout_probability(self) -> float:
        return self.dropout.p

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor]:
        self.require_backend(attention_mask)
        batch, length, _ = hidden_states.shape
        value = linear(self.value, hidden_states).view(batch, length, -1, self.attention_head_size).transpose(1, 2)
        key_states, value, past_length = self.update_cache(hidden_states, value, past_key_values)
        positions = Positions.from_position_ids(
            kwargs.get("position_ids"), length, value.shape[-2], past_length, attention_mask
        )
        return self.synthesize(hidden_states, value, attention_mask, positions, key_states)  # type: ignore[return-value]


class SynthesizerBertConfig(BertConfig):
    """`BertConfig`, and which layers are synthesized and how."""

    model_type = "synthesizer_bert"

    synthesizer: dict | None = None


BERT = register_family(
    Family(
        name="bert",
        stock_attention=BertSelfAttention,
        attention=SynthesizerBertSelfAttention,
        config_class=SynthesizerBertConfig,
        models=synthesizer_models(
            __name__, stock_models(modeling_bert, modeling_bert.BertPreTrainedModel), SynthesizerBertConfig
        ),
        stack_of=lambda name, module: "encoder",
    )
)
