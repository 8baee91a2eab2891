"""Dropout of the routes that compute again in the backward: both passes draw the same numbers from a seed."""

from __future__ import annotations

import torch

from .operand_checks import is_plain


def draw_seed(dropout: float, tensor: torch.Tensor) -> int:
    """A seed from PyTorch's generator of the processor; 0 without dropout, and for meta and fake tensors.

    `torch.manual_seed`, checkpointing and `fork_rng` keep that generator. A seed is drawn on the host for any device,
    so that nothing waits for the device.
    """
    if not dropout or tensor.is_meta or not is_plain(tensor):
        return 0
    return int(torch.randint(1 << 62, (), device="cpu"))


def generator_from(seed: int, device: torch.device) -> torch.Generator | None:
    """A generator of this device that starts from a seed; None for the seed 0."""
    return torch.Generator(device=device).manual_seed(seed) if seed else None


def dropout_factors(like: torch.Tensor, dropout: float, generator: torch.Generator | None) -> torch.Tensor:
    """0 for dropped weights, 1 / (1 − p) for the others, in the shape of `like`."""
    kept = torch.empty_like(like, memory_format=torch.contiguous_format).bernoulli_(1 - dropout, generator=generator)
    return kept if dropout == 1 else kept.div_(1 - dropout)
