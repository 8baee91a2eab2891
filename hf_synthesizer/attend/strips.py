"""The route of every device that is no processor: any sum of forms, a strip of queries of the whole batch at a time.

A strip holds all rows of the batch and as many heads and queries as its size allows. Its logits are made from their terms,
masked, softmaxed in at least float32, dropped and multiplied with the values, so that nothing as large as all logits is
ever made. The backward makes each strip again, dropout included; nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..device.autocast import without_autocast
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from .cuts import Cuts, Strip, Tensors
from .randomness import generator_state
from .terms import Terms


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Whatever runs on another device than a processor; a graph compiler is given plain operations to work on."""
    return not (traced() or on_processor(value.device))


def attend(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    cuts, tensors = Cuts.of(terms, value, mask, dropout)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return StripAttention.apply(cuts, *tensors)
    with without_autocast(value.device):
        return forward(cuts, tensors)


def forward(cuts: Cuts, tensors: Tensors) -> torch.Tensor:
    """The output (B, H, Lq, d_v), in operations that have derivatives of every order."""
    value = cast(torch.Tensor, tensors[0])
    generator = cuts.generator(value.device)
    made: list[list[torch.Tensor]] = []
    for strip in cuts.strips():
        if strip.queries.start == 0:
            made.append([])
        made[-1].append(cuts.attend(strip, cuts.pieces(strip, tensors), generator))
    return _joined([_joined(rows, -2) for rows in made], 1)


class StripAttention(torch.autograd.Function):
    """`forward`, with a backward that makes each strip again instead of keeping what it was made of."""

    @staticmethod
    def forward(ctx: Any, cuts: Cuts, *tensors: torch.Tensor | None) -> torch.Tensor:
        value = cast(torch.Tensor, tensors[0])
        ctx.cuts = replace(cuts, state=generator_state(value)) if cuts.dropout else cuts
        ctx.save_for_backward(*tensors)
        with without_autocast(value.device):
            return forward(cuts, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        make = _differentiable if torch.is_grad_enabled() else _gradients
        with without_autocast(gradient.device):
            return None, *make(ctx.cuts, ctx.saved_tensors, needed, gradient)


def _differentiable(
    cuts: Cuts, tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """Gradients that have gradients themselves, for penalties on them; all strips are kept."""
    # As views, each of its own: one tensor may be given twice, and each place has its own gradient.
    own = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    wanted = [cast(torch.Tensor, tensor) for tensor, need in zip(own, needed, strict=True) if need]
    grads = iter(torch.autograd.grad(forward(cuts, own), wanted, gradient, create_graph=True))
    return [next(grads) if need else None for need in needed]


def _gradients(
    cuts: Cuts, tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradient of each tensor that needs one, a strip at a time."""
    value = cast(torch.Tensor, tensors[0])
    generator = cuts.generator(value.device)
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    for strip in cuts.strips():
        pieces = [
            None if piece is None else piece.detach().requires_grad_(need)
            for piece, need in zip(cuts.pieces(strip, tensors), needed, strict=True)
        ]
        with torch.enable_grad():
            output = cuts.attend(strip, pieces, generator)
        wanted = [cast(torch.Tensor, piece) for piece, need in zip(pieces, needed, strict=True) if need]
        made = iter(torch.autograd.grad(output, wanted, gradient[:, strip.heads, strip.queries]))
        del output
        for number, need in enumerate(needed):
            if need:
                _put(cuts, grads, number, tensors, strip, next(made))
    return [
        None if grad is None else grad.to(cast(torch.Tensor, tensor).dtype)
        for grad, tensor in zip(grads, tensors, strict=True)
    ]


def _put(
    cuts: Cuts, grads: list[torch.Tensor | None], number: int, tensors: Tensors, strip: Strip, piece: torch.Tensor
) -> None:
    """Add a strip's gradient to that of a whole tensor; sums over strips are taken in at least float32."""
    tensor, grad = cast(torch.Tensor, tensors[number]), grads[number]
    if grad is None and piece.shape == tensor.shape and cuts.is_whole(strip):
        grads[number] = piece
        return
    if grad is None:
        dtype = piece.dtype if cuts.is_alone(number, tensor) else torch.promote_types(piece.dtype, torch.float32)
        grad = grads[number] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    grad[cuts.place(number, tensor, tensors, strip)] += piece


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
