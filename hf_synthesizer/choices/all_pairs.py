"""The best keys by hashing where rows are short: every pair of a query and a key is looked at.

To name the k largest numbers of a row costs more than to find the k-th and to compare all with it: a processor sorts bare
numbers ten times as fast as numbers with their places.
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
    """Which keys a query chooses: bool (g, Lq, Lk), for g heads of some rows.

    Args:
        asked, stored: Q (g, Lq, d') and P (g, Lk, d').
        values: a · P for each direction of each hash, (g, T, d', Lk).
        scores: q · k, (g, Lq, Lk).
        keep: (g, Lk), False at padding; None where there is none.
        size: how many keys a bucket holds, fewer than Lk.
    """
    heads, hashes, width, length = values.shape
    members = bucket_members(values, keep, size).flatten(1, 2)  # (g, T·2·d', Lk)
    means = members @ key  # (g, T·2·d', d')
    means /= size if keep is None else keep.sum(-1).clamp(min=1, max=size)[:, None, None]
    # The larger, the smaller the distance: ‖Q − mean‖² = ‖Q‖² − 2 (Q · mean − ‖mean‖² / 2).
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
    # A query finds no fewer keys than a bucket has, so that none of the others is among the largest; but for padding.
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
    """What is added to hide: 0 where `keep` is True, a huge negative number elsewhere. To fill in numbers takes longer."""
    return keep.to(dtype).sub_(1).mul_(torch.finfo(dtype).max / 4)


def values_at_ranks(values: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The numbers that stand at these places when each row (…, L) is sorted from small to large: (…, 1) each."""
    if values.device.type == "cpu":
        sorted_values = torch.from_numpy(np.sort(values.numpy(), axis=-1))
    else:
        sorted_values = values.sort(-1).values
    return [sorted_values[..., rank, None] for rank in ranks]


def largest(values: torch.Tensor, among: torch.Tensor | None, size: int) -> torch.Tensor:
    """The `size` largest numbers of each row; the first ones of those that are equal. bool, like the values.

    `among` leaves out numbers, all of which have to be smaller than any that counts.
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
