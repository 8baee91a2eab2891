"""The tiled route: any sum of forms on a processor, one cache-sized tile at a time.

A tile of logits is the sum of its terms: a product for low-rank terms, an outer product for tiled terms, rows of a table for
static terms. Softmax and the product with the values follow while the tile is in the cache. Memory holds one tile, not L²
numbers. The backward recomputes the tiles, with the same dropout.
"""

from __future__ import annotations

from typing import Any

import torch

from ..device.matmul import default_library_is_fast, product
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from . import differentiable
from .differentiable import differentiable_gradients
from .sdpa import is_low_rank
from .static import softmax_gradient
from .terms import Terms
from .tile_inputs import Block, TileInputs

FEWEST_KEYS = 256  # with fewer keys, one call of the kernel is cheaper than our many calls


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """All logits on a processor for which the kernel of `scaled_dot_product_attention` is slower.

    That kernel is faster for low-rank logits of short sequences, and of any length if PyTorch's own matrix library runs at full
    speed. A graph compiler gets plain operations instead.
    """
    if traced() or not on_processor(value.device) or isinstance(mask.causal_offset, torch.Tensor):
        return False
    if mask.causal_offset is not None and mask.causal_offset < 0:
        return False
    if dropout or not terms.low_rank or terms.tiled or terms.explicit:
        return True
    if default_library_is_fast() and is_low_rank(terms):
        return False
    bias = [terms.key_bias, *(tensor for term in terms.static for tensor in term)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in bias if tensor is not None):
        return True  # the kernel has no gradient for its bias
    return (
        value.dtype in (torch.float32, torch.bfloat16) and len(terms.low_rank) == 1 and value.shape[-2] >= FEWEST_KEYS
    )


def tiled_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    tile_inputs, tensors = TileInputs.of(terms, value, mask, dropout)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        output = TiledAttention.apply(tile_inputs, *tensors)
    else:
        with torch.autocast("cpu", enabled=False):
            output = tiled_output(tile_inputs.with_tensors(tensors))
    return output.transpose(1, 2)  # from (B, Lq, H, d_v), which the output projection reads


def tiled_output(tile_inputs: TileInputs) -> torch.Tensor:
    """The output (B, Lq, H, d_v)."""
    value = tile_inputs.value
    batch, heads, _, width = value.shape
    output = value.new_zeros(batch, tile_inputs.query_length, heads, width)
    generator = tile_inputs.generator()
    for block in tile_inputs.blocks():
        weights = tile_inputs.weights(block)
        kept = tile_inputs.dropout_mask(weights, generator)
        if kept is not None:
            weights *= kept
        out = product(weights, tile_inputs.head_rows(0, block)[:, : block.seen])  # (g, rows, d_v)
        output[block.row, block.queries, block.heads] = out.transpose(0, 1)
        del weights, kept  # frees the tile before the next one
    return output


class TiledAttention(torch.autograd.Function):
    """`tiled_output`, with a backward that recomputes each tile instead of keeping L² numbers."""

    @staticmethod
    def forward(ctx: Any, tile_inputs: TileInputs, *tensors: torch.Tensor | None) -> torch.Tensor:
        tile_inputs = tile_inputs.with_tensors(tensors)
        with torch.autocast("cpu", enabled=False):
            output = tiled_output(tile_inputs)
        ctx.tile_inputs = tile_inputs.without_tensors()
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
            return None, *differentiable_gradients(
                lambda tensors: differentiable.differentiable_output(ctx.tile_inputs.with_tensors(tensors)),
                tensors,
                needed,
                gradient,
            )
        tile_inputs = ctx.tile_inputs.with_tensors(ctx.saved_tensors)
        grads = tile_inputs.empty_gradients(ctx.needs_input_grad[1:])
        generator = tile_inputs.generator()
        for block in tile_inputs.blocks():
            weights = tile_inputs.weights(block)
            kept = tile_inputs.dropout_mask(weights, generator)
            rows = gradient[block.row, block.queries, block.heads].transpose(0, 1).contiguous()  # (g, rows, d_v)
            _add_value_gradient(tile_inputs, block, weights if kept is None else weights * kept, rows, grads)
            logit_grad = product(rows, tile_inputs.head_rows(0, block)[:, : block.seen].transpose(-1, -2))
            if kept is not None:
                logit_grad *= kept
            tile_inputs.accumulate_gradients(block, softmax_gradient(logit_grad, weights), grads)
        return None, *grads


def _add_value_gradient(
    tile_inputs: TileInputs, block: Block, weights: torch.Tensor, rows: torch.Tensor, grads: list[torch.Tensor | None]
) -> None:
    if grads[0] is not None:
        summed = product(rows.transpose(-1, -2).contiguous(), weights)  # (g, d_v, seen)
        tile_inputs.add_key_gradient(grads[0], block, summed.transpose(-1, -2))
