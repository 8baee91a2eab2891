"""The reference route, which defines the result of all others: logits, mask, softmax, dropout, matrix product."""

from __future__ import annotations

import torch
from torch import nn

from ..logits.forms import Logits, Sparse
from ..logits.masks import AttentionMask
from ..logits.reach import Windowed


def reference_attention(
    logits: Logits, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(logits + mask) @ value`: output (B, H, Lq, d_v) and weights (B, H, Lq, Lk)."""
    weights = attention_weights(logits, value, mask, dropout)
    return weights @ value, weights


def attention_weights(logits: Logits, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """`softmax(logits + mask)` for each row of the batch of `value`, in its dtype: (B, H, Lq, Lk).

    The softmax runs in at least float32. A query with no visible key gets weights 0 and output 0. The weights are returned
    after dropout, as in Transformers.
    """
    if isinstance(logits, Windowed):
        mask = logits.restricted(mask, value.device)
        logits = logits.logits
    if isinstance(logits, Sparse):
        logits, mask = logits.with_chosen_keys(mask)
    scores = logits.with_mask(mask).materialize()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask.bias is not None:
        scores = scores + mask.bias
    visible = mask.visible(scores.shape[-2], scores.shape[-1], scores.device)
    if visible is None:
        weights = scores.softmax(-1)
    else:
        # The dtype's minimum, not −inf: the gradient of a row of only −inf is NaN.
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(~visible, 0.0)
    weights = weights.to(value.dtype).expand(value.shape[0], -1, -1, -1)
    return nn.functional.dropout(weights, dropout)
