"""Plain encoders of text and images: DistilBERT, LayoutLM, ViT, DeiT, DINOv2, BEiT, SigLIP, CLIP; and ALBERT, MPNet, ESM."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ..finding.layer_classes import register_layer
from ..mixin import SynthesizerMixin
from ..refusals import require_no_other_states


@register_layer
class PlainLayer(SynthesizerMixin):
    """Hidden states and a mask; no cache. CLIP's text tower says by keyword that it is causal."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)


@register_layer
class AlbertLayer(SynthesizerMixin):
    """As a plain encoder, but the attention module also applies dropout, residual and norm."""

    knows = frozenset({"output_dropout", "LayerNorm"})

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)

    def project_output(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return cast(nn.Module, self.LayerNorm)(hidden_states + super().project_output(output, hidden_states))


@register_layer
class EsmLayer(SynthesizerMixin):
    """A plain encoder that gets rotations, and whose class can also be cross-attention."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        position_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_no_other_states(encoder_hidden_states)
        return self.attend_to_itself(hidden_states, attention_mask, **kwargs)


@register_layer
class MPNetLayer(SynthesizerMixin):
    """Does not use the attention interface. The bias of relative positions stays, as in T5.

    Weights are returned under `output_attentions`, whatever the backend.
    """

    serves_dot_product = True
    knows = frozenset({"permute", "matmul", "transpose", "math", "sqrt", "nn", "functional", "softmax"})

    @property
    def backend(self) -> str:
        return "eager"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        output, weights = self.attend_to_itself(
            hidden_states, attention_mask, position_bias=position_bias, need_weights=output_attentions, **kwargs
        )
        return (output, weights) if output_attentions else (output,)  # type: ignore[return-value]
