"""The check at first use: once for each device, compares the kernels with the reference on a small case."""

from __future__ import annotations

from functools import cache

import torch
from transformers.utils import logging

from ...logits.forms import KeyBias, Logits, LowRank, Static, Sum, Tiled
from ...logits.masks import AttentionMask
from .. import reference
from ..terms import Terms
from .operands import launch_attention

logger = logging.get_logger(__name__)

TOLERANCE = 1e-4
"""In float32, forward and backward: far above rounding errors, far below the errors of a wrong kernel."""
Case = tuple[Logits, torch.Tensor, AttentionMask, list[torch.Tensor]]


@cache
def passes_check(device: torch.device) -> bool:
    """Whether the kernels equal the reference on this device. If not, there is one warning, and another route serves.

    Any error of compiler or driver counts as a failure.
    """
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            difference = largest_difference(device)
    except Exception as error:  # errors of compiler and driver have no common class
        difference, reason = float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        reason = f"it differs from the reference by {difference:.1e}, and {TOLERANCE:.0e} is allowed"
    if difference <= TOLERANCE:
        return True
    logger.warning(
        f"The Triton kernel of hf_synthesizer failed its check on {device} ({reason}). Attention takes another exact "
        f"route on this device, in this process. HF_SYNTHESIZER_TRITON=0 turns the kernel and this warning off."
    )
    return False


def largest_difference(device: torch.device) -> float:
    """The largest difference to the reference in output and gradients, with all terms, padding and a causal mask."""
    logits, value, mask, inputs = check_case(device)
    expected = reference.reference_attention(logits, value, mask)[0]
    actual = launch_attention(Terms.of(logits, mask), value, mask, 0.0)
    pairs = [(expected, actual)]
    pairs += zip(*(torch.autograd.grad(output.square().sum(), inputs) for output in (expected, actual)), strict=True)
    return float(torch.stack([(one - other).detach().abs().max() for one, other in pairs]).max())


def check_case(device: torch.device) -> Case:
    """Two rows of the batch, two heads, 40 tokens of which some are padding; the same numbers in each call."""
    batch, heads, length = 2, 2, 40
    generator = torch.Generator().manual_seed(0)  # leaves the user's random state unchanged

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    inputs = [
        tensor(batch, heads, length, 8),
        tensor(1, heads, length, 8),
        tensor(heads, length, length),
        tensor(heads),
        tensor(batch, heads, length, 33),
        tensor(batch, heads, length, 2),
        tensor(batch, heads, 1, length),
        tensor(batch, heads, length, 20),
    ]
    query, key, table, weight, inner, outer, bias, value = inputs
    logits = Sum(
        [
            (None, LowRank(query, key)),
            (weight, Static(table)),
            (None, Tiled(inner, outer, length)),
            (None, KeyBias(bias, length)),
        ]
    )
    keep = (torch.arange(length) < torch.tensor([[length], [length - 9]]))[:, None, None].to(device)
    return logits, value, AttentionMask(keep, None, 0), inputs
