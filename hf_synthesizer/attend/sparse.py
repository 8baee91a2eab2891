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
from ..choices.tokens import Tokens
from ..device.tracing import traced, without_autocast
from ..logits.forms import Sparse
from ..logits.masks import AttentionMask, Extents
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


RowsAttention = Callable[[Any, Rows], torch.Tensor]
ROWS_ATTENTION: dict[type, RowsAttention] = {
    Strides: strides.strided_attention,
    FixedBlocks: strides.fixed_attention,
    Buckets: buckets.bucket_attention,
    Clusters: clusters.cluster_attention,
}
"""From a kind of choice to how its rows are attended to: (choice, rows) → (b, H, n, d_v)."""


def serves(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whole sequences under a mask of keys, with or without a triangle, in eager mode.

    A step of decoding has one query, and a compiled graph no loop over rows: both are served by the choice as a mask.
    """
    return (
        type(logits.choice) in ROWS_ATTENTION
        and not traced()
        and logits.query_length == value.shape[-2] > 1
        and isinstance(logits.start, int)
        and logits.start == 0
        and mask.causal_offset in (None, 0)
        and (mask.causal_offset is None or logits.choice.causal)
        and (mask.keep is None or mask.keep.shape[1:3] == (1, 1))
        and positions_follow_indices(logits, value, mask)
    )


def positions_follow_indices(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether each token is as far behind its row's first one as their indices are, which rows without padding rely on."""
    if logits.known_positions is None or (mask.keep is None and not logits.known_positions.per_row):
        return True
    tokens = Tokens.of(mask, logits.query_length, value.shape[-2], 0, value.device)
    equal = torch.eq(tokens.positions(value.device)[1], logits.known_positions.numbers(value.device)[1])
    return bool((equal if tokens.keep is None else equal | ~tokens.keep).all())


def sparse_attention(
    logits: Sparse, value: torch.Tensor, mask: AttentionMask, causal: bool, dropout: float
) -> torch.Tensor:
    """The output (B, H, L, d_v). `mask` is a simplified one; `causal` says whether the layer is a decoder's."""
    rows_attention = ROWS_ATTENTION[type(logits.choice)]
    query, key = (tensor.to(value.dtype) for tensor in (logits.query, logits.key))
    with without_autocast(value.device):
        batch = Rows(query, key, value, mask.bias, None, logits.scaling, dropout, causal)
        if mask.keep is None:
            return rows_attention(logits.choice, batch)
        keep, extents = mask.keep[:, 0, 0], mask.extents()  # (B or 1, L)
        outputs, order = [], []
        for rows, first, last in rows_by_extent(extents):
            every_row = len(rows) == len(keep)
            holes = any(extents.has_holes(row) for row in rows)
            part = _select_rows(batch, keep if holes else None, slice(None) if every_row else rows, slice(first, last))
            outputs.append(
                _pad_output(
                    rows_attention(logits.choice, part) if first < last else part.value, first, value.shape[-2]
                )
            )
            order += rows
    if len(outputs) == 1:
        return outputs[0]
    output = torch.cat(outputs)
    return output if order == sorted(order) else output[torch.tensor(order, device=value.device).argsort()]


def rows_by_extent(extents: Extents) -> Iterator[tuple[list[int], int, int]]:
    """The rows of a mask with the same first and last token: their numbers, the first index, and the last + 1."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(len(extents.first)):
        groups.setdefault(extents.of(row), []).append(row)
    for (start, stop), rows in groups.items():
        yield rows, start, stop


def _select_rows(batch: Rows, keep: torch.Tensor | None, rows: slice | list[int], indices: slice) -> Rows:
    """Some indices of some rows; as views, where the rows are next to each other. No `keep`: they are tokens all."""
    if isinstance(rows, list) and rows[-1] - rows[0] == len(rows) - 1:
        rows = slice(rows[0], rows[-1] + 1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, indices][rows]

    bias = batch.bias
    if bias is not None:
        bias = bias[..., indices] if bias.shape[-2] == 1 else bias[..., indices, indices]
        bias = bias if len(bias) == 1 else bias[rows]
    query = cut(batch.query)
    holes = keep
    if keep is not None:
        holes = (keep[:, indices] if len(keep) == 1 else keep[rows, indices]).expand(len(query), -1)
    return Rows(
        query=query,
        key=query if batch.key is batch.query else cut(batch.key),
        value=cut(batch.value),
        bias=bias,
        holes=holes,
        scaling=batch.scaling,
        dropout=batch.dropout,
        causal=batch.causal,
    )


def _pad_output(output: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """(b, H, n, d_v) with zeros around: (b, H, L, d_v)."""
    behind = length - first - output.shape[-2]
    return torch.nn.functional.pad(output, (0, 0, first, behind)) if first or behind else output
