"""Checks of kernel operands before their pointers are taken: a kernel reads any address it gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import AttentionInputError

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Types whose `data_ptr()` points to their numbers. Other subclasses may have no memory."""


def is_plain(tensor: torch.Tensor | None) -> bool:
    return tensor is None or type(tensor) in PLAIN_TYPES


def require_operand(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    broadcast: int = 0,
) -> None:
    """Check an operand's shape, dtype, device and memory layout.

    The first `broadcast` dimensions may be 1. The last dimension has stride 1.

    Raises:
        AttentionInputError: if the operand has another shape, dtype, device or layout, or no memory.
    """
    actual = tensor.shape
    is_valid = (
        len(actual) == len(shape)
        and all(
            size == expected or (size == 1 and dimension < broadcast)
            for dimension, (size, expected) in enumerate(zip(actual, shape, strict=True))
        )
        and tensor.dtype in dtypes
        and tensor.device == device
        and type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and (actual[-1] == 1 or tensor.stride(-1) == 1)
        and tensor.data_ptr() != 0
    )
    if not is_valid:
        expected = ", ".join(
            f"1 or {size}" if dimension < broadcast else str(size) for dimension, size in enumerate(shape)
        )
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise AttentionInputError(
            f"Attention was given {name} of shape {tuple(actual)}, {str(tensor.dtype).removeprefix('torch.')} on "
            f"{tensor.device} ({type(tensor).__name__}); expected is ({expected}), {kinds} on {device}. "
            f"Use one batch size, one number of heads and one length, and put all tensors on one device."
        )


def require_factors(a: int, b: int, keys: int) -> None:
    """Check that the factors of an outer product reach all keys.

    Raises:
        AttentionInputError: if a·b < keys.
    """
    if a * b < keys:
        raise AttentionInputError(
            f"Attention was given an outer product of {a} and {b} numbers for {keys} keys. Use factors whose product is at "
            f"least {keys}."
        )


def broadcast_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last. A dimension of size 1 has stride 0, and so serves all indices."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False))
