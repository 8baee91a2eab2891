"""Differentiable gradients for the routes with their own backward.

A gradient penalty needs a graph of the gradient (`create_graph=True`). The backward of the tiles is not differentiable. So the
output is computed again by the reference's operations, which autograd records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..logits.forms import Explicit
from ..logits.masks import AttentionMask
from . import reference
from .terms import Terms, static_terms
from .tile_inputs import TileInputs

Tensors = Sequence[torch.Tensor | None]


def differentiable_gradients(
    compute: Callable[[Tensors], torch.Tensor], tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradient of `compute(tensors)` with respect to each needed tensor, with a graph (`create_graph=True`)."""
    device = gradient.device.type
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # The same tensor may be two inputs, such as queries and keys. Each input has its own gradient.
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        differentiated = [tensor for tensor, need in zip(inputs, needed, strict=True) if need and tensor is not None]
        input_gradients = iter(
            torch.autograd.grad(compute(inputs), differentiated, gradient, create_graph=True, allow_unused=True)
        )
    return [
        next(input_gradients) if need and tensor is not None else None
        for tensor, need in zip(inputs, needed, strict=True)
    ]


def differentiable_output(tile_inputs: TileInputs) -> torch.Tensor:
    """The output of the tiled route, with the same dropout, in differentiable operations: (B, Lq, H, d_v)."""
    value, (query, key, key_bias) = tile_inputs.value, tile_inputs.tensors[1:4]
    factors = tile_inputs.tensors[4 : tile_inputs.first_explicit]
    terms = Terms(
        static=static_terms(tile_inputs.tensors[tile_inputs.first_static :]),
        tiled=[
            (inner, outer, tile_inputs.key_length)  # type: ignore[misc]
            for inner, outer in zip(factors[::2], factors[1::2], strict=True)
        ],
        key_bias=key_bias,
        explicit=list(tile_inputs.tensors[tile_inputs.first_explicit : tile_inputs.first_static]),  # type: ignore[arg-type]
        query_length=tile_inputs.query_length,
    )
    logits = terms.joined_bias()
    if query is not None and key is not None:
        product = query @ key.transpose(-1, -2)  # (B, H, Lq, Lk)
        logits = product if logits is None else logits + product
    shape = (*value.shape[:2], tile_inputs.query_length, tile_inputs.key_length)
    logits = logits.expand(shape)  # type: ignore[union-attr]
    mask = AttentionMask(tile_inputs.keep, None, tile_inputs.causal_offset)
    output, weights = reference.reference_attention(Explicit(logits), value, mask)
    if tile_inputs.dropout:
        output = (weights * _whole_dropout_mask(tile_inputs, weights)) @ value
    return output.transpose(1, 2)


def _whole_dropout_mask(tile_inputs: TileInputs, weights: torch.Tensor) -> torch.Tensor:
    """The tiles' dropout masks in one tensor: (B, H, Lq, Lk)."""
    dropout_mask = torch.zeros_like(weights)
    generator = tile_inputs.generator()
    for block in tile_inputs.blocks():
        target = dropout_mask[block.row, block.heads, block.queries, : block.seen]
        target.copy_(tile_inputs.dropout_mask(torch.empty(target.shape, dtype=weights.dtype), generator))  # type: ignore[arg-type]
    return dropout_mask
