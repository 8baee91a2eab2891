"""The chunked route: any sum of forms on any device, one chunk of the logits at a time.

A chunk is some rows of the batch, heads and queries, and the keys that these queries see. Its logits are summed,
masked, normalised by a softmax, dropped out and multiplied with the values. The full logits never exist. The backward
computes each chunk again, with the same dropout, and autograd differentiates it.

On a processor, a chunk fits the cache, and padding at the end of a row is cut off. On other devices, a chunk holds the
whole batch, and no tensor is read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..device.autocast import autocast_dtype, without_autocast
from ..device.matmul import product
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from .chunk_inputs import ChunkInputs
from .differentiable import differentiable_gradients, plain_output
from .kernel_terms import KernelTerms, Tensors
from .terms import Terms


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """All logits. A graph compiler gets plain operations instead. With a window, distances must count indices."""
    reach = mask.reach
    return not traced() and (
        reach is None or not (reach.positions.per_row or isinstance(reach.positions.start, torch.Tensor))
    )


def chunked_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v). Under autocast, operands of matrix products have its dtype."""
    autocast_to = None if value.dtype == torch.float64 else autocast_dtype(value.device)
    if autocast_to is not None:
        value = value.to(autocast_to)
    with without_autocast(value.device):
        inputs, tensors, dimensions = ChunkInputs.of(terms, value, mask, dropout)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            output = ChunkedAttention.apply(inputs, dimensions, *tensors)
        else:
            output = chunked_output(inputs, dimensions, tensors)
    return output.transpose(1, 2)  # from (B, Lq, H, d_v), which the output projection reads


def chunked_output(inputs: ChunkInputs, dimensions: Sequence[str], tensors: Tensors) -> torch.Tensor:
    """The output (B, Lq, H, d_v)."""
    value = cast(torch.Tensor, tensors[0])
    batch, heads, query_length, _ = inputs.shape
    skips_rows = inputs.ends is not None and 0 in inputs.ends
    output = (value.new_zeros if skips_rows else value.new_empty)(batch, query_length, heads, value.shape[-1])
    generator = inputs.generator(value.device)
    for chunk in inputs.chunks():
        parts = [
            None if tensor is None else chunk.part_of(tensor, names)
            for tensor, names in zip(tensors, dimensions, strict=True)
        ]
        part = product(inputs.weights(chunk, parts, generator), cast(torch.Tensor, parts[0]))
        output[chunk.rows, chunk.queries, chunk.heads] = part.transpose(1, 2)
    return output


class ChunkedAttention(torch.autograd.Function):
    """`chunked_output`, with a backward that computes each chunk again instead of keeping its intermediate tensors."""

    @staticmethod
    def forward(
        ctx: Any, inputs: ChunkInputs, dimensions: Sequence[str], *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.inputs, ctx.dimensions = inputs, dimensions
        ctx.save_for_backward(*tensors)
        return chunked_output(inputs, dimensions, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, tensors, needed = ctx.inputs, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # create_graph=True
            factors = inputs.dropout_factors(tensors[0])

            def compute(tensors: Tensors) -> torch.Tensor:
                terms, value = KernelTerms.from_tensors(tensors[1:], inputs.counts), cast(torch.Tensor, tensors[0])
                return plain_output(terms, value, inputs.shape[2], inputs.mask, factors)

            return None, None, *differentiable_gradients(compute, tensors, needed, gradient)
        with without_autocast(gradient.device):
            return None, None, *chunked_gradients(inputs, ctx.dimensions, tensors, needed, gradient)


def chunked_gradients(
    inputs: ChunkInputs, dimensions: Sequence[str], tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradient of each tensor that needs one, a chunk at a time. Sums over chunks are in at least float32."""
    generator = inputs.generator(gradient.device)
    numbers = [number for number, need in enumerate(needed) if need]
    differentiated = {number: cast(torch.Tensor, tensors[number]) for number in numbers}
    once = {number: inputs.writes_once(tensor, dimensions[number]) for number, tensor in differentiated.items()}
    grads: dict[int, torch.Tensor] = {}
    for chunk in inputs.chunks():
        parts = [
            None if tensor is None else chunk.part_of(tensor, names).detach().requires_grad_(need)
            for tensor, names, need in zip(tensors, dimensions, needed, strict=True)
        ]
        with torch.enable_grad():
            weights = inputs.weights(chunk, parts, generator)
        output_gradient = gradient[chunk.rows, chunk.queries, chunk.heads].transpose(1, 2).contiguous()
        part_gradients = weights_gradients(weights, parts, numbers, output_gradient)
        del weights
        for number, part in part_gradients:
            tensor = differentiated[number]
            if once[number] and part.shape == tensor.shape:
                grads[number] = part
                continue
            if number not in grads:
                dtype = part.dtype if once[number] else torch.promote_types(part.dtype, torch.float32)
                new = torch.empty if once[number] and inputs.covers_all else torch.zeros
                grads[number] = new(tensor.shape, dtype=dtype, device=tensor.device)
            for index, piece in chunk.pieces(part, tensor, dimensions[number]):
                target = grads[number][index]
                target.copy_(piece) if once[number] else target.add_(piece)
    for number, tensor in differentiated.items():
        grads[number] = grads[number].to(tensor.dtype) if number in grads else torch.zeros_like(tensor)
    return [grads.get(number) for number in range(len(tensors))]


def weights_gradients(
    weights: torch.Tensor, parts: Tensors, numbers: Sequence[int], gradient: torch.Tensor
) -> list[tuple[int, torch.Tensor]]:
    """(number, gradient) of each numbered part, given the gradient (b, h, q, d_v) of `weights @ value`."""
    value, terms = cast(torch.Tensor, parts[0]).detach(), [number for number in numbers if number]
    gradients: list[tuple[int, torch.Tensor]] = []
    if 0 in numbers:  # computed transposed: copying the gradient is cheaper than copying the weights
        gradients.append((0, product(gradient.transpose(-1, -2), weights.detach()).transpose(-1, -2)))
    if terms:
        inputs = [cast(torch.Tensor, parts[number]) for number in terms]
        weights_gradient = product(gradient, value.transpose(-1, -2))
        gradients += zip(terms, torch.autograd.grad(weights, inputs, weights_gradient), strict=True)
    return gradients
