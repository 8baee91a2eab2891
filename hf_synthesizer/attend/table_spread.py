"""Upper bounds of max − min over a static table."""

from __future__ import annotations

import torch

from ..device.reading import DeviceRead, read_later
from ..upstream.torch_names import base_of
from .terms import RelativeTerm, StaticTerm

UNKNOWN = float("inf")


def spread(term: StaticTerm) -> float:
    """An upper bound of max − min over the term's numbers. Waits for the device."""
    table = term.table.detach()
    if term.keys is None:
        low, high = torch.aminmax(table)
        difference = float(high - low)
    else:  # |a · b| ≤ |a| · |b|
        longest = [factor.detach().float().norm(dim=-1).amax(-1) for factor in (table, term.keys)]
        difference = 2 * float((longest[0] * longest[1]).max())
    return difference if term.weight is None else difference * float(term.weight.detach().abs().max())


def spread_by_distance(term: RelativeTerm) -> float:
    """An upper bound of max − min over a row's logits by distance."""
    low, high = torch.aminmax(term.rows.detach(), dim=-1)
    apart = float((high - low).max())
    return apart if term.weight is None else apart * float(term.weight.detach().abs().max())


def known_spread(term: StaticTerm) -> float:
    """An upper bound of `spread` without waiting for the device; infinite while it is unknown.

    The bound is computed once for each version of a parameter. The next read of a mask transfers it. Tables in training
    and terms with a mixing weight change at each step, so their bounds stay unknown.
    """
    if term.weight is not None:
        return UNKNOWN
    tensors = [_base(tensor) for tensor in (term.table, term.keys) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return UNKNOWN
    if len(tensors) == 1:
        extremes = read_later(
            DeviceRead(tensors[0], "extremes", lambda: torch.stack(torch.aminmax(tensors[0].detach())))
        )
        return UNKNOWN if extremes is None else extremes[1] - extremes[0]
    norms = [read_later(_largest_norm(tensor)) for tensor in tensors]
    if norms[0] is None or norms[1] is None:
        return UNKNOWN
    return 2 * norms[0][0] * norms[1][0]  # |a · b| ≤ |a| · |b|


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view belongs to. A bound of the whole also bounds each part, and stays cached over forwards."""
    whole = base_of(tensor)
    return tensor if whole is None else whole


def _largest_norm(factor: torch.Tensor) -> DeviceRead:
    return DeviceRead(factor, "longest", lambda: factor.detach().float().norm(dim=-1).amax().view(1))
