"""The route of the sparse form: only the pairs that meet are ever made.

The batch is cut into rows, each without its padding, and rows of equal length go together. What a choice lets meet is a
set of small dense problems, so that each kind of choice has a way of its own: windows and strides by reshaping
(`strides.py`), clusters by sorting (`clusters.py`), buckets by sorting the queries (`buckets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..choices import Buckets, Clusters, FixedBlocks, Strides
from ..logits import Sparse
from ..masks import AttentionMask
from ..tracing import traced
from . import buckets, clusters, strides


@dataclass(frozen=True)
class Rows:
    """Some rows of the batch whose tokens stand on the same slots, without padding.

    `query` and `key` are (b, H, n, r), before scaling, `value` (b, H, n, d_v), `bias` broadcasts to (b, H, n, n) or is
    None. `holes` (b, n) is False at padding between tokens, or None where there is none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    holes: torch.Tensor | None
    scaling: float
    dropout: float
    causal: bool


Way = Callable[[Any, Rows], torch.Tensor]
WAYS: dict[type, Way] = {
    Strides: strides.attend_strided,
    FixedBlocks: strides.attend_fixed,
    Buckets: buckets.attend,
    Clusters: clusters.attend,
}
"""From a kind of choice to how its rows are attended to: (choice, rows) → (b, H, n, d_v)."""


def serves(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whole sequences under a mask of keys, with or without a triangle, in eager mode.

    A step of decoding has one query, and a compiled graph no loop over rows: both are served by the choice as a mask.
    """
    return (
        type(logits.choice) in WAYS
        and not traced()
        and logits.query_length == value.shape[-2] > 1
        and isinstance(logits.start, int)
        and logits.start == 0
        and mask.causal_offset in (None, 0)
        and (mask.causal_offset is None or logits.choice.causal)
        and (mask.keep is None or mask.keep.shape[1:3] == (1, 1))
    )


def attend(logits: Sparse, value: torch.Tensor, mask: AttentionMask, causal: bool, dropout: float) -> torch.Tensor:
    """The output (B, H, L, d_v). `mask` is a simplified one; `causal` says whether the layer is a decoder's."""
    way = WAYS[type(logits.choice)]
    dtype = value.dtype
    with torch.autocast(value.device.type, enabled=False):
        whole = Rows(
            logits.query.to(dtype), logits.key.to(dtype), value, mask.bias, None, logits.scaling, dropout, causal
        )
        if mask.keep is None:
            return way(logits.choice, whole)
        output = torch.zeros_like(value)
        for rows, first, last in equal_rows(mask.keep[:, 0, 0].expand(len(value), -1)):
            made = way(logits.choice, _cut(whole, mask.keep, rows, slice(first, last)))
            output = output.index_put((rows,), torch.nn.functional.pad(made, (0, 0, first, value.shape[-2] - last)))
    return output


def equal_rows(keep: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The rows of `keep` (B, L) with the same first and last token: their numbers, the first slot, and the last + 1."""
    slots = torch.arange(keep.shape[-1], device=keep.device)
    first = torch.where(keep, slots, keep.shape[-1]).amin(-1)
    last = torch.where(keep, slots, -1).amax(-1) + 1
    groups: dict[tuple[int, int], list[int]] = {}
    for row, extent in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if extent[0] < extent[1]:
            groups.setdefault(extent, []).append(row)
    for (start, stop), rows in groups.items():
        yield torch.tensor(rows, device=keep.device), start, stop


def _cut(whole: Rows, keep: torch.Tensor, rows: torch.Tensor, slots: slice) -> Rows:
    bias = whole.bias
    if bias is not None:
        bias = bias if len(bias) == 1 else bias[rows]
        bias = bias[..., slots] if bias.shape[-2] == 1 else bias[..., slots, slots]
    holes = keep[:, 0, 0, slots].expand(len(whole.value), -1)[rows]
    query, key, value = (tensor[rows, :, slots] for tensor in (whole.query, whole.key, whole.value))
    return Rows(
        query, key, value, bias, None if bool(holes.all()) else holes, whole.scaling, whole.dropout, whole.causal
    )
