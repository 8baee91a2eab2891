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
from ..device.autocast import without_autocast
from ..device.tracing import traced
from ..logits.forms import Sparse
from ..logits.masks import AttentionMask, Extents
from ..logits.tokens import Tokens
from . import buckets, clusters, strides


@dataclass(frozen=True)
class Rows:
    """Some rows of the batch whose tokens stand on the same indices, without padding.

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
        and counts_from_first(logits, value, mask)
    )


def counts_from_first(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether each token is as far behind its row's first one as their indices are, which rows without padding rely on."""
    if logits.known is None or (mask.keep is None and not logits.known.per_row):
        return True
    tokens = Tokens.of(mask, logits.query_length, value.shape[-2], 0, value.device)
    same = torch.eq(tokens.positions(value.device)[1], logits.known.numbers(value.device)[1])
    return bool((same if tokens.keep is None else same | ~tokens.keep).all())


def attend(logits: Sparse, value: torch.Tensor, mask: AttentionMask, causal: bool, dropout: float) -> torch.Tensor:
    """The output (B, H, L, d_v). `mask` is a simplified one; `causal` says whether the layer is a decoder's."""
    way = WAYS[type(logits.choice)]
    query, key = (tensor.to(value.dtype) for tensor in (logits.query, logits.key))
    with without_autocast(value.device):
        whole = Rows(query, key, value, mask.bias, None, logits.scaling, dropout, causal)
        if mask.keep is None:
            return way(logits.choice, whole)
        keep, extents = mask.keep[:, 0, 0], mask.extents()  # (B or 1, L)
        made, order = [], []
        for rows, first, last in equal_rows(extents):
            everything = len(rows) == len(keep)
            holes = any(extents.has_holes(row) for row in rows)
            part = _cut(whole, keep if holes else None, slice(None) if everything else rows, slice(first, last))
            made.append(_padded(way(logits.choice, part) if first < last else part.value, first, value.shape[-2]))
            order += rows
    if len(made) == 1:
        return made[0]
    output = torch.cat(made)
    return output if order == sorted(order) else output[torch.tensor(order, device=value.device).argsort()]


def equal_rows(extents: Extents) -> Iterator[tuple[list[int], int, int]]:
    """The rows of a mask with the same first and last token: their numbers, the first index, and the last + 1."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(len(extents.first)):
        groups.setdefault(extents.of(row), []).append(row)
    for (start, stop), rows in groups.items():
        yield rows, start, stop


def _cut(whole: Rows, keep: torch.Tensor | None, rows: slice | list[int], indices: slice) -> Rows:
    """Some indices of some rows; as views, where the rows are next to each other. No `keep`: they are tokens all."""
    if isinstance(rows, list) and rows[-1] - rows[0] == len(rows) - 1:
        rows = slice(rows[0], rows[-1] + 1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, indices][rows]

    bias = whole.bias
    if bias is not None:
        bias = bias[..., indices] if bias.shape[-2] == 1 else bias[..., indices, indices]
        bias = bias if len(bias) == 1 else bias[rows]
    query = cut(whole.query)
    holes = keep
    if keep is not None:
        holes = (keep[:, indices] if len(keep) == 1 else keep[rows, indices]).expand(len(query), -1)
    return Rows(
        query=query,
        key=query if whole.key is whole.query else cut(whole.key),
        value=cut(whole.value),
        bias=bias,
        holes=holes,
        scaling=whole.scaling,
        dropout=whole.dropout,
        causal=whole.causal,
    )


def _padded(made: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """(b, H, n, d_v) with zeros around: (b, H, L, d_v)."""
    behind = length - first - made.shape[-2]
    return torch.nn.functional.pad(made, (0, 0, first, behind)) if first or behind else made
