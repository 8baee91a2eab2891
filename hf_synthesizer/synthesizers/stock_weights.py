"""Whether a stock layer's weights are ordinary numbers, or were quantized.

Quantizers differ: torch's own packs a weight away behind a method, bitsandbytes keeps integers of another shape, torchao and
quanto keep tensors of a subclass that looks like the original. What they have in common is that nobody may compute with the
weight but the module that holds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
