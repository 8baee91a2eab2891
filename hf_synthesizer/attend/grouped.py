"""Attention in groups of heads: each group takes the route of its form. Outputs are in the order of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ..logits.forms import Grouped
from ..logits.masks import AttentionMask


def grouped_attention(
    logits: Grouped,
    value: torch.Tensor,
    mask: AttentionMask,
    attend_group: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    *,
    dropout: float,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (B, H, Lq, d_v) and, with `need_weights`, weights (B, H, Lq, Lk). `attend_group` computes one group."""
    groups = list(zip(logits.logits, logits.heads.split(value), masks_of_groups(logits, mask), strict=True))
    if need_weights:  # the output is computed from the returned weights, so that gradients reach them
        parts = [attend_group(*group, dropout=dropout, need_weights=True)[1] for group in groups]
        weights = logits.heads.join(cast(list[torch.Tensor], parts))
        return weights @ value, weights
    outputs = [attend_group(*group, dropout=dropout)[0] for group in groups]
    # Laid out as (B, Lq, H, d_v), which the output projection reads: reordering the heads is the only copy.
    return logits.heads.join([part.transpose(1, 2) for part in outputs], dim=2).transpose(1, 2), None


def masks_of_groups(logits: Grouped, mask: AttentionMask) -> list[AttentionMask]:
    """The mask of each group. A mask shared by all heads stays the same tensor, so that cached reads stay valid."""
    if mask.keep is None:
        keeps: list[torch.Tensor | None] = [None] * len(logits.logits)
    else:
        keeps = [*logits.heads.split(mask.keep)]
    biases = [None] * len(keeps) if mask.bias is None else logits.heads.split(mask.bias)
    group_masks = []
    for keep, bias in zip(keeps, biases, strict=True):
        shared = keep is mask.keep
        group_mask = AttentionMask(keep, bias, mask.causal_offset, mask.source if shared else keep)
        group_mask.known_extents = mask.known_extents if shared else None
        group_masks.append(group_mask)
    return group_masks
