"""What can be taken from a stock layer's weights: whether they are ordinary numbers, or were quantized.

Quantizers differ: torch's own packs a weight away behind a method, bitsandbytes keeps integers of another shape, torchao and
quanto keep tensors of a subclass that looks like the original. What they have in common is that nobody may compute with the
weight but the module that holds it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import UnsupportedModelError


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor that holds its numbers as they are, whole or sharded."""
    return isinstance(tensor, torch.Tensor) and (
        isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor)
    )


def is_quantized(projection: nn.Module) -> bool:
    """Whether the module's weight is anything but plain floating-point numbers."""
    weight = getattr(projection, "weight", None)
    return not (is_plain(weight) and weight.is_floating_point())  # type: ignore[union-attr]


def place_of(projection: nn.Module, example: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point dtype of what takes the projection's place.

    They are its weight's; where that does not tell (it is packed, or holds integers), those of `example`.
    """
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return example.device, example.dtype
    return weight.device, weight.dtype if weight.is_floating_point() else example.dtype


def rows_of(projection: nn.Module, rows: torch.Tensor) -> nn.Linear:
    """A `Linear` of its own with these rows of a projection; `Conv1D` keeps its weight transposed.

    Raises:
        UnsupportedModelError: for a quantized projection, whose rows nobody can take.
    """
    if is_quantized(projection):
        raise UnsupportedModelError(
            "This patch needs some rows of a projection alone (one projection makes queries, keys and values, several heads "
            "share a key, or some heads only keep theirs), but the projections were quantized, and nothing can be cut out of "
            "them. Patch the model before it is quantized."
        )
    weight = cast(torch.Tensor, projection.weight)
    weight = weight if hasattr(projection, "out_features") else weight.t()
    bias = cast("torch.Tensor | None", getattr(projection, "bias", None))
    rows = rows.to(weight.device)
    own = nn.Linear(weight.shape[1], len(rows), bias=bias is not None, device="meta", dtype=weight.dtype)
    own.weight = nn.Parameter(weight.detach()[rows].clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        own.bias = nn.Parameter(bias.detach()[rows].clone(), requires_grad=bias.requires_grad)
    return own
