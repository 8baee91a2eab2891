"""The best keys by hashing for short rows: all pairs of queries and keys are compared.

Finding the k-th largest number and comparing all numbers with it is faster than `topk`: a processor sorts numbers ten times as
fast as numbers with their indices.
"""

from __future__ import annotations

import numpy as np
import torch


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    keep: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """Which keys each query chooses: bool (g, Lq, Lk), for g heads of one or more rows.

    Args:
        query, key: Q (g, Lq, d') and P (g, Lk, d').
        values: a · P for each direction of each hash, (g, T, d', Lk).
        scores: q · k, (g, Lq, Lk).
        keep: (g, Lk), False at padding; None without padding.
        size: number of keys in a bucket, less than Lk.
    """
    heads, hashes, width, length = values.shape
    members = bucket_members(values, keep, size).flatten(1, 2)  # (g, T·2·d', Lk)
    means = members @ key  # (g, T·2·d', d')
    means /= size if keep is None else keep.sum(-1).clamp(min=1, max=size)[:, None, None]
    # A larger value means a smaller distance: ‖Q − mean‖² = ‖Q‖² − 2 (Q · mean − ‖mean‖² / 2).
    nearness = query @ means.transpose(-1, -2)  # (g, Lq, T·2·d')
    nearness -= means.square().sum(-1).unsqueeze(-2) / 2
    bucket = _argmax(nearness.unflatten(-1, (hashes, 2 * width)))  # (g, Lq, T)
    bucket += torch.arange(heads * hashes, device=bucket.device).view(heads, 1, hashes) * (2 * width)
    members = members.flatten(0, 1)
    times_found = members.index_select(0, bucket[..., 0].flatten())
    for number in range(1, hashes):
        times_found += members.index_select(0, bucket[..., number].flatten())
    times_found = times_found.view(heads, -1, length)
    if hashes == 1:
        return times_found > 0
    # Without padding a query finds at least `size` keys, so no other key is among the `size` largest.
    hidden = times_found.clamp_(max=1).sub_(1).mul_(torch.finfo(times_found.dtype).max / 4)
    return largest(scores + hidden, None if keep is None else hidden == 0, size)


def bucket_members(values: torch.Tensor, keep: torch.Tensor | None, size: int) -> torch.Tensor:
    """The keys with the largest and with the smallest values: 1 or 0 in the dtype of the values, (g, T, 2·d', Lk)."""
    *before, width, length = values.shape
    members = values.new_empty(*before, 2 * width, length)
    above, below = members.split(width, dim=-2)
    if keep is None:
        most, below_most, least, over = values_at_ranks(values, length - size, length - size - 1, size - 1, size)
        if not bool((most == below_most).any() | (least == over).any()):
            torch.ge(values, most, out=above)
            torch.le(values, least, out=below)
        else:
            above.copy_(largest(values, None, size))
            below.copy_(largest(-values, None, size))
        return members
    keep = keep[:, None, None]
    hidden = hiding_bias(keep, values.dtype)
    above.copy_(largest(values + hidden, keep, size))
    below.copy_(largest(hidden - values, keep, size))
    return members


def hiding_bias(keep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask: 0 where `keep` is True, a huge negative number elsewhere. Adding is faster than `masked_fill`."""
    return keep.to(dtype).sub_(1).mul_(torch.finfo(dtype).max / 4)


def values_at_ranks(values: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The numbers at these ranks of each row (…, L), sorted in ascending order: (…, 1) each."""
    if values.device.type == "cpu":
        sorted_values = torch.from_numpy(np.sort(values.numpy(), axis=-1))
    else:
        sorted_values = values.sort(-1).values
    return [sorted_values[..., rank, None] for rank in ranks]


def largest(values: torch.Tensor, among: torch.Tensor | None, size: int) -> torch.Tensor:
    """True for the `size` largest numbers of each row; of equal numbers, the first ones.

    `among` is False for excluded numbers, which must be smaller than all others.
    """
    length = values.shape[-1]
    least, below_most = values_at_ranks(values, length - size, length - size - 1)
    kept = values >= least
    if among is not None:
        kept &= among
    if bool((least == below_most).any()):
        tied = values == least if among is None else (values == least) & among
        above = kept & ~tied
        kept = above | (tied & (tied.cumsum(-1) <= size - above.sum(-1, keepdim=True)))
    return kept


def _argmax(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(-1))
    return values.argmax(-1)
