"""Reads the weights of stock projections, and tells whether they are quantized.

Quantizers store weights in different ways. PyTorch packs a weight behind a method, bitsandbytes keeps integers of
another shape, and torchao and quanto keep a tensor subclass that looks like the original. In all cases only the module
that holds the weight can compute with it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedModelError


def is_plain(tensor: Any) -> bool:
    """Whether it is a plain tensor, whole or sharded, and no quantized one."""
    return isinstance(tensor, torch.Tensor) and (
        isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__")
    )


def is_quantized(projection: nn.Module) -> bool:
    """Whether the module's weight is not a plain floating-point tensor."""
    weight = getattr(projection, "weight", None)
    return not (is_plain(weight) and weight.is_floating_point())  # type: ignore[union-attr]


def place_of(projection: nn.Module, example: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    """Return the device and floating-point dtype for a module that replaces the projection.

    They come from the projection's weight. If the weight is packed or holds integers, they come from `example`.
    """
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return example.device, example.dtype
    return weight.device, weight.dtype if weight.is_floating_point() else example.dtype


def rows_of(projection: nn.Module, rows: torch.Tensor) -> nn.Linear:
    """Build a new `Linear` from these rows of a projection (`Conv1D` has a transposed weight).

    Raises:
        UnsupportedModelError: for a quantized projection.
    """
    if is_quantized(projection):
        raise UnsupportedModelError(
            "This patch needs some rows of a projection (one projection makes queries, keys and values, several heads share a "
            "key, or only some heads keep their rows), but the projections are quantized, and rows cannot be selected. "
            "Patch the model before it is quantized."
        )
    weight = cast(torch.Tensor, projection.weight)
    weight = weight if hasattr(projection, "out_features") else weight.t()
    bias = cast("torch.Tensor | None", getattr(projection, "bias", None))
    rows = rows.to(weight.device)
    selected = nn.Linear(weight.shape[1], len(rows), bias=bias is not None, device="meta", dtype=weight.dtype)
    selected.weight = nn.Parameter(weight.detach()[rows].clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        selected.bias = nn.Parameter(bias.detach()[rows].clone(), requires_grad=bias.requires_grad)
    return selected
