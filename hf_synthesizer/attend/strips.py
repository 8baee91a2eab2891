"""The strips route, for every device but processors: any sum of forms, one strip of queries of the whole batch at a time.

A strip holds all rows of the batch, and as many heads and queries as `MOST_LOGITS` allows. Its logits are built, masked,
normalised by a softmax in at least float32, dropped out and multiplied with the values. The full logits never exist. The
backward recomputes each strip, with the same dropout. No tensor is read from the device.
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
from .randomness import generator_state
from .strip_inputs import Strip, StripInputs, Tensors
from .terms import Terms


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """All logits on any device but a processor. A graph compiler gets plain operations instead."""
    return not (traced() or on_processor(value.device))


def strips_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    strip_inputs, tensors = StripInputs.of(terms, value, mask, dropout)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return StripAttention.apply(strip_inputs, *tensors)
    with without_autocast(value.device):
        return strips_output(strip_inputs, tensors)


def strips_output(strip_inputs: StripInputs, tensors: Tensors) -> torch.Tensor:
    """The output (B, H, Lq, d_v), in operations that have derivatives of every order."""
    value = cast(torch.Tensor, tensors[0])
    generator = strip_inputs.generator(value.device)
    outputs: list[list[torch.Tensor]] = []
    for strip in strip_inputs.strips():
        if strip.queries.start == 0:
            outputs.append([])
        outputs[-1].append(strip_inputs.strip_output(strip, strip_inputs.pieces(strip, tensors), generator))
    return _concatenate([_concatenate(rows, -2) for rows in outputs], 1)


class StripAttention(torch.autograd.Function):
    """`strips_output`, with a backward that recomputes each strip instead of keeping its intermediate tensors."""

    @staticmethod
    def forward(ctx: Any, strip_inputs: StripInputs, *tensors: torch.Tensor | None) -> torch.Tensor:
        value = cast(torch.Tensor, tensors[0])
        ctx.strip_inputs = (
            replace(strip_inputs, state=generator_state(value)) if strip_inputs.dropout else strip_inputs
        )
        ctx.save_for_backward(*tensors)
        with without_autocast(value.device):
            return strips_output(strip_inputs, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        gradients_of = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        with without_autocast(gradient.device):
            return None, *gradients_of(ctx.strip_inputs, ctx.saved_tensors, needed, gradient)


def _differentiable_gradients(
    strip_inputs: StripInputs, tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """Gradients that are themselves differentiable, for gradient penalties. All strips stay in memory."""
    # Each input gets its own view: the same tensor may be two inputs, and each input has its own gradient.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    inputs = [cast(torch.Tensor, tensor) for tensor, need in zip(views, needed, strict=True) if need]
    grads = iter(torch.autograd.grad(strips_output(strip_inputs, views), inputs, gradient, create_graph=True))
    return [next(grads) if need else None for need in needed]


def _gradients(
    strip_inputs: StripInputs, tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradient of each tensor that needs one, a strip at a time."""
    value = cast(torch.Tensor, tensors[0])
    generator = strip_inputs.generator(value.device)
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    for strip in strip_inputs.strips():
        pieces = [
            None if piece is None else piece.detach().requires_grad_(need)
            for piece, need in zip(strip_inputs.pieces(strip, tensors), needed, strict=True)
        ]
        with torch.enable_grad():
            output = strip_inputs.strip_output(strip, pieces, generator)
        inputs = [cast(torch.Tensor, piece) for piece, need in zip(pieces, needed, strict=True) if need]
        piece_gradients = iter(torch.autograd.grad(output, inputs, gradient[:, strip.heads, strip.queries]))
        del output
        for number, need in enumerate(needed):
            if need:
                _add_gradient(strip_inputs, grads, number, tensors, strip, next(piece_gradients))
    return [
        None if grad is None else grad.to(cast(torch.Tensor, tensor).dtype)
        for grad, tensor in zip(grads, tensors, strict=True)
    ]


def _add_gradient(
    strip_inputs: StripInputs,
    grads: list[torch.Tensor | None],
    number: int,
    tensors: Tensors,
    strip: Strip,
    piece: torch.Tensor,
) -> None:
    """Add a strip's gradient to the whole tensor's gradient. Sums over strips use at least float32."""
    tensor, grad = cast(torch.Tensor, tensors[number]), grads[number]
    if grad is None and piece.shape == tensor.shape and strip_inputs.covers_all_logits(strip):
        grads[number] = piece
        return
    if grad is None:
        dtype = (
            piece.dtype
            if strip_inputs.has_disjoint_parts(number, tensor)
            else torch.promote_types(piece.dtype, torch.float32)
        )
        grad = grads[number] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    grad[strip_inputs.part_of(number, tensor, tensors, strip)] += piece


def _concatenate(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
