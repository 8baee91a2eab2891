"""Attention within clusters. Tokens are sorted by cluster; clusters of similar size form one dense batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...choices import Clusters
from ..sdpa import kernel_attention
from .rows import Rows

SMALLEST = 16  # clusters up to this size form one group; larger ones are grouped by powers of two


def cluster_attention(choice: Clusters, rows: Rows) -> torch.Tensor:
    """`routing`: each token attends to its own cluster. (b, H, n, d_v)."""
    keep = None if rows.holes is None else rows.holes.unsqueeze(1)
    labels = choice.labels(rows.key, keep)  # (b, H, n)
    batch, heads, length, width = rows.value.shape
    # As (b·n·H, …), the memory layout of the projections' outputs.
    query, key, value = (x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in (rows.query, rows.key, rows.value))
    output = torch.zeros_like(value)
    for members, occupied in clusters_by_size(labels, keep):  # (c, size) each
        mask = _additive_mask(members, occupied, rows)
        queries, keys, values = (x[members].unsqueeze(1) for x in (query, key, value))  # (c, 1, size, …)
        cluster_output = kernel_attention(queries, keys, values, mask.unsqueeze(1), rows.dropout, scale=rows.scaling)[
            :, 0
        ]
        if torch.is_grad_enabled():
            output = output.index_put((members[occupied],), cluster_output[occupied])
        else:
            output[members[occupied]] = cluster_output[occupied]
    return output.view(batch, length, heads, width).transpose(1, 2)


def clusters_by_size(labels: torch.Tensor, keep: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Groups of clusters of similar size, for labels (b, H, n) of the tokens in `keep` (b, 1, n).

    Each group is the members (c, size) of c clusters, as indices into the b·n·H tokens of all heads, and a bool tensor
    (c, size) that is False at unused entries.
    """
    batch, heads, length = labels.shape
    count = int(labels.max()) + 1
    row, head, index = (torch.arange(size, device=labels.device) for size in (batch, heads, length))
    row, head = row.view(-1, 1, 1), head.view(-1, 1)
    cluster = ((row * heads + head) * count + labels).flatten()  # cluster numbers that are unique over rows and heads
    tokens = ((row * length + index) * heads + head).flatten()
    if keep is not None:
        kept = keep.expand_as(labels).flatten()
        cluster, tokens = cluster[kept], tokens[kept]
    cluster, order = cluster.sort(stable=True)
    tokens = tokens[order]
    _, sizes = cluster.unique_consecutive(return_counts=True)
    starts = sizes.cumsum(0) - sizes
    size, smaller = SMALLEST, 0
    while smaller < int(sizes.max()):
        of_this_size = (sizes > smaller) & (sizes <= size)
        if bool(of_this_size.any()):
            columns = torch.arange(min(size, int(sizes[of_this_size].max())), device=labels.device)
            occupied = columns < sizes[of_this_size].unsqueeze(-1)
            yield tokens[(starts[of_this_size].unsqueeze(-1) + columns).clamp(max=len(tokens) - 1)], occupied
        size, smaller = 2 * size, size


def _additive_mask(members: torch.Tensor, occupied: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The additive (or, without a bias, bool) mask of clusters: (c, size, size)."""
    allowed = occupied.unsqueeze(-2)
    if rows.bias is None:
        return allowed.expand(-1, occupied.shape[-1], -1)
    _, heads, length, _ = rows.value.shape
    bias = rows.bias.to(rows.value.dtype)
    row, index, head = members // (length * heads), members // heads % length, members % heads
    gathered = bias[
        (row if len(bias) > 1 else row * 0)[..., :, None],
        (head if bias.shape[1] > 1 else head * 0)[..., :, None],
        (index if bias.shape[2] > 1 else index * 0)[..., :, None],
        index[..., None, :],
    ]
    return gathered.masked_fill(~allowed, float("-inf"))
