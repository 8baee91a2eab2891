"""The route through `scaled_dot_product_attention`: low-rank forms are its queries and keys, the rest is its bias."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..masks import AttentionMask
from .terms import Terms


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Whatever has at least one low-rank term."""
    return bool(terms.low_rank)


def attend(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v); weights are never built."""
    query, key = terms.joined_low_rank(value)
    padding = query.shape[-1] - value.shape[-1]
    # The fused kernels want one width for all three.
    if padding > 0:
        value = functional.pad(value, (0, padding))
    elif padding < 0:
        query, key = functional.pad(query, (0, -padding)), functional.pad(key, (0, -padding))
    bias = terms.joined_bias()
    causal = mask.causal_offset is not None
    if causal and bias is None and mask.keep is None and _is_zero(mask.causal_offset):
        attention_mask = None
    else:
        causal = False
        visible = mask.visible(query.shape[-2], key.shape[-2], query.device)
        attention_mask = visible if bias is None else bias.to(value.dtype)
        if bias is not None and visible is not None:
            attention_mask = attention_mask.masked_fill(~visible, float("-inf"))  # type: ignore[union-attr]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(value.shape[0], *attention_mask.shape[1:])
        if attention_mask.shape[-2] == 1:
            attention_mask = attention_mask.contiguous()  # small, and the kernel is slow over a batch of stride 0
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=1.0
    )
    return output[..., : output.shape[-1] - padding] if padding > 0 else output


def _is_zero(offset: int | torch.Tensor | None) -> bool:
    return isinstance(offset, int) and offset == 0
