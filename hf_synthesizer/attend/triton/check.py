"""The check at first use: on each device, a small case through the kernels and through the reference, once."""

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
"""Of float32, forward and backward: far above what the order of a sum changes, far below what a wrong kernel does."""
Case = tuple[Logits, torch.Tensor, AttentionMask, list[torch.Tensor]]


@cache
def passes_check(device: torch.device) -> bool:
    """Whether the kernels give the reference's numbers here; if not, one warning, and another route serves.

    Whatever stops them (a compiler that is missing, a GPU that is too old) counts as not passing.
    """
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            difference = largest_difference(device)
    except Exception as error:  # the compiler's and the driver's errors have no common class
        difference, reason = float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        reason = f"it differs from the reference by {difference:.1e}, and {TOLERANCE:.0e} is allowed"
    if difference <= TOLERANCE:
        return True
    logger.warning(
        f"The Triton kernel of hf_synthesizer failed its check on {device} ({reason}). Attention takes another exact "
        f"route on this device, in this process. HF_SYNTHESIZER_TRITON=0 leaves the kernel out, and this warning."
    )
    return False


def largest_difference(device: torch.device) -> float:
    """How far the kernels' output and gradients are from the reference's, with all terms, a mask and a triangle."""
    logits, value, mask, inputs = check_case(device)
    expected = reference.reference_attention(logits, value, mask)[0]
    actual = launch_attention(Terms.of(logits, mask), value, mask, 0.0)
    pairs = [(expected, actual)]
    pairs += zip(*(torch.autograd.grad(output.square().sum(), inputs) for output in (expected, actual)), strict=True)
    return float(torch.stack([(one - other).detach().abs().max() for one, other in pairs]).max())


def check_case(device: torch.device) -> Case:
    """Two rows of the batch, two heads, 40 tokens of which some are padding; its numbers are the same each time."""
    batch, heads, length = 2, 2, 40
    generator = torch.Generator().manual_seed(0)  # the user's own draws stay as they would be

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
