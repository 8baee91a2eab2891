"""How far the numbers of a static table lie apart, known without asking a device for it."""

from __future__ import annotations

import torch

from ..device.tracing import DeviceRead, read_later
from .terms import StaticTerm

UNKNOWN = float("inf")


def known_spread(term: StaticTerm) -> float:
    """`StaticTerm.spread` or more, infinite while it is unknown.

    It is measured once for each state of a parameter, and becomes known when the next mask is asked about. A table that is
    being trained has another state each step, and a mixing weight is another tensor each time: neither is measured.
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
    """The parameter that a tensor is a view of: what is known of it holds for each part, in every forward."""
    return tensor if tensor._base is None else tensor._base


def _largest_norm(factor: torch.Tensor) -> DeviceRead:
    return DeviceRead(factor, "longest", lambda: factor.detach().float().norm(dim=-1).amax().view(1))
