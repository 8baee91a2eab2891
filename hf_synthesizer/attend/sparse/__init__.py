"""The sparse route: it computes only the chosen pairs of queries and keys.

Padding is cut off each row of the batch, and rows with the same first and last token are computed together. The chosen
pairs form small dense problems, and each choice finds them in its own way: windows and strides by reshaping
(`strides.py`), clusters by sorting (`clusters.py`), buckets by sorting the queries (`buckets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...choices import Buckets, Clusters, FixedBlocks, Strides
from ...choices.patterns import Pattern
from ...device.autocast import without_autocast
from ...device.tracing import traced
from ...logits.forms import Sparse
from ...logits.masks import AttentionMask, Extents
from ...logits.tokens import Tokens
from . import buckets, clusters, strides
from .rows import Rows

RowsAttention = Callable[[Any, Rows], torch.Tensor]
ROWS_ATTENTION: dict[type, RowsAttention] = {
    Strides: strides.strided_attention,
    FixedBlocks: strides.fixed_attention,
    Buckets: buckets.bucket_attention,
    Clusters: clusters.cluster_attention,
}
"""The attention function of each choice: (choice, rows) → (b, H, n, d_v)."""


def serves(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whole sequences under a mask of keys, with or without a triangle, in eager mode.

    A step of decoding and a compiled graph take another route, with the choice as a mask.
    """
    return (
        type(logits.choice) in ROWS_ATTENTION
        and not traced()
        and (isinstance(logits.choice, Pattern) or not value.is_meta)  # other choices read the sizes of groups
        and logits.query_length == value.shape[-2] > 1
        and isinstance(logits.start, int)
        and logits.start == 0
        and mask.causal_offset in (None, 0)
        and (mask.causal_offset is None or logits.choice.causal)
        and (mask.keep is None or mask.keep.shape[1:3] == (1, 1))
        and positions_follow_indices(logits, value, mask)
    )


def positions_follow_indices(logits: Sparse, value: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether the known positions, if any, equal indices counted from each row's first token, as this route assumes."""
    if logits.known_positions is None or (mask.keep is None and not logits.known_positions.per_row):
        return True
    tokens = Tokens.of(mask, logits.query_length, value.shape[-2], 0, value.device)
    equal = torch.eq(tokens.positions(value.device)[1], logits.known_positions.numbers(value.device)[1])
    return bool((equal if tokens.keep is None else equal | ~tokens.keep).all())


def sparse_attention(
    logits: Sparse, value: torch.Tensor, mask: AttentionMask, causal: bool, dropout: float
) -> torch.Tensor:
    """The output (B, H, L, d_v). `mask` is simplified; `causal` says whether the layer is a decoder's."""
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
    """Groups of rows with the same first and last token: (row numbers, first index, last index + 1)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(len(extents.first)):
        groups.setdefault(extents.of(row), []).append(row)
    for (start, stop), rows in groups.items():
        yield rows, start, stop


def _select_rows(batch: Rows, keep: torch.Tensor | None, rows: slice | list[int], indices: slice) -> Rows:
    """The given indices of the given rows, as views if the rows are neighbours. `keep` None: there are no holes."""
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
    key = query if batch.key is batch.query else cut(batch.key)
    return replace(batch, query=query, key=key, value=cut(batch.value), bias=bias, holes=holes)


def _pad_output(output: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """Pad (b, H, n, d_v) with zeros to (b, H, L, d_v)."""
    behind = length - first - output.shape[-2]
    return torch.nn.functional.pad(output, (0, 0, first, behind)) if first or behind else output
