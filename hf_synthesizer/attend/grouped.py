"""Groups of heads: each meets its values by the route of its own form, and all come back in the order of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..logits import Grouped
from ..masks import AttentionMask


def attend(
    logits: Grouped,
    value: torch.Tensor,
    mask: AttentionMask,
    attend_one: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (B, H, Lq, d_v) and, if they are wanted, weights (B, H, Lq, Lk); `attend_one` serves a form that is no group."""
    groups = zip(logits.logits, logits.heads.split(value), masks(logits, mask), strict=True)
    outputs, weights = zip(*(attend_one(*group, **options) for group in groups), strict=True)
    # Laid out as (B, Lq, H, d_v), which is how it is read: to put heads in order is the only copy.
    output = logits.heads.join([part.transpose(1, 2) for part in outputs], dim=2).transpose(1, 2)
    return output, None if weights[0] is None else logits.heads.join(weights)


def masks(logits: Grouped, mask: AttentionMask) -> list[AttentionMask]:
    """What each group may see; a mask for all heads stays the same tensor, so that what is known of it is not asked again."""
    if mask.keep is None:
        keeps: list[torch.Tensor | None] = [None] * len(logits.logits)
    else:
        keeps = [*logits.heads.split(mask.keep)]
    biases = [None] * len(keeps) if mask.bias is None else logits.heads.split(mask.bias)
    made = []
    for keep, bias in zip(keeps, biases, strict=True):
        same = keep is mask.keep
        own = AttentionMask(keep, bias, mask.causal_offset, mask.source if same else keep)
        own.known_extents = mask.known_extents if same else None
        made.append(own)
    return made
