"""The route through `scaled_dot_product_attention`: low-rank forms are its queries and keys, the rest is its bias."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..logits import KeyBias, Logits, LowRank, Sum
from ..masks import AttentionMask


def serves(logits: Logits, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whatever has at least one low-rank term."""
    return any(isinstance(term, LowRank) for _, term in _terms(logits))


def attend(logits: Logits, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v); weights are never built."""
    query, key, bias = _fold(logits)
    query, key = query.to(value.dtype), key.to(value.dtype)
    key = key.expand(value.shape[0], -1, -1, -1)
    width = query.shape[-1]
    padding = width - value.shape[-1]
    # The fused kernels want one width for all three.
    if padding > 0:
        value = functional.pad(value, (0, padding))
    elif padding < 0:
        query, key = functional.pad(query, (0, -padding)), functional.pad(key, (0, -padding))
    bias = _join(bias, mask.bias)
    causal = mask.causal_offset is not None
    if causal and bias is None and mask.keep is None and _is_zero(mask.causal_offset):
        attention_mask = None
    else:
        causal = False
        visible = mask.visible(query.shape[-2], key.shape[-2], query.device)
        attention_mask = visible if bias is None else bias.to(value.dtype)
        if bias is not None and visible is not None:
            attention_mask = attention_mask.masked_fill(~visible, float("-inf"))  # type: ignore[union-attr]
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=1.0
    )
    return output[..., : output.shape[-1] - padding] if padding > 0 else output


def _terms(logits: Logits) -> list[tuple[torch.Tensor | None, Logits]]:
    return logits.terms if isinstance(logits, Sum) else [(None, logits)]


def _fold(logits: Logits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries and keys of all low-rank terms side by side, and everything else as one additive bias."""
    queries, keys, bias = [], [], None
    for weight, term in _terms(logits):
        head_weight = None if weight is None else weight[:, None, None]
        if isinstance(term, LowRank):
            queries.append(term.query if head_weight is None else term.query * head_weight.to(term.query.dtype))
            keys.append(term.key)
            if term.key_bias is None:
                continue
            extra = term.key_bias.unsqueeze(-2)  # (1 or B, H, 1, Lk)
        else:
            extra = term.bias if isinstance(term, KeyBias) else term.materialize()
        bias = _join(bias, extra if head_weight is None else extra * head_weight.to(extra.dtype))
    batch = max(len(key) for key in keys)
    keys = [key.expand(batch, -1, -1, -1) for key in keys]
    return torch.cat(queries, dim=-1), torch.cat(keys, dim=-1), bias


def _join(bias: torch.Tensor | None, extra: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None or extra is None:
        return extra if bias is None else bias
    return bias + extra


def _is_zero(offset: int | torch.Tensor | None) -> bool:
    return isinstance(offset, int) and offset == 0
