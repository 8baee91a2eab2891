"""What the routes with a backward of their own do where that backward has to have a derivative: plain operations.

A gradient penalty asks for a graph of the gradient (`create_graph=True`). The tiles' backward is none: it writes into memory,
and makes products that have no derivative. So everything is computed once more, as the reference does it, and autograd
records how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..logits.forms import Explicit
from ..logits.masks import AttentionMask
from . import reference
from .blocks import Problem
from .terms import Terms, static_terms

Tensors = Sequence[torch.Tensor | None]


def gradients(
    compute: Callable[[Tensors], torch.Tensor], tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of `compute(tensors)`, for each tensor that needs one, with a graph."""
    device = gradient.device.type
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # One tensor may come twice, as queries and keys: each of them has a gradient of its own.
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need and tensor is not None]
        made = iter(torch.autograd.grad(compute(inputs), wanted, gradient, create_graph=True, allow_unused=True))
    return [next(made) if need and tensor is not None else None for tensor, need in zip(inputs, needed, strict=True)]


def tiled(problem: Problem) -> torch.Tensor:
    """What the tiled route computes, dropout included: (B, Lq, H, d_v)."""
    value, (query, key, key_bias) = problem.value, problem.tensors[1:4]
    factors = problem.tensors[4 : problem.first_explicit]
    terms = Terms(
        static=static_terms(problem.tensors[problem.first_static :]),
        tiled=[
            (inner, outer, problem.key_length)  # type: ignore[misc]
            for inner, outer in zip(factors[::2], factors[1::2], strict=True)
        ],
        key_bias=key_bias,
        explicit=list(problem.tensors[problem.first_explicit : problem.first_static]),  # type: ignore[arg-type]
        query_length=problem.query_length,
    )
    logits = terms.joined_bias()
    if query is not None and key is not None:
        product = query @ key.transpose(-1, -2)  # (B, H, Lq, Lk)
        logits = product if logits is None else logits + product
    shape = (*value.shape[:2], problem.query_length, problem.key_length)
    logits = logits.expand(shape)  # type: ignore[union-attr]
    mask = AttentionMask(problem.keep, None, problem.causal_offset)
    output, weights = reference.attend(Explicit(logits), value, mask)
    if problem.dropout:
        output = (weights * _dropout_mask(problem, weights)) @ value
    return output.transpose(1, 2)


def _dropout_mask(problem: Problem, weights: torch.Tensor) -> torch.Tensor:
    """The dropout that the tiles draw, side by side: (B, H, Lq, Lk)."""
    drawn = torch.zeros_like(weights)
    generator = problem.generator()
    for block in problem.blocks():
        place = drawn[block.row, block.heads, block.queries, : block.seen]
        place.copy_(problem.dropout_mask(torch.empty(place.shape, dtype=weights.dtype), generator))  # type: ignore[arg-type]
    return drawn
