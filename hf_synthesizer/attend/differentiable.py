"""Differentiable gradients for the routes with their own backward.

A gradient penalty needs a graph of the gradient (`create_graph=True`). The backward of a kernel is not differentiable.
So the output is computed again by the reference's operations, which autograd records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..device.autocast import without_autocast
from ..logits.forms import Explicit
from ..logits.masks import AttentionMask
from . import reference
from .kernel_terms import KernelTerms, Tensors


def differentiable_gradients(
    compute: Callable[[Tensors], torch.Tensor], tensors: Tensors, needed: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradient of `compute(tensors)` with respect to each needed tensor, with a graph (`create_graph=True`)."""
    with torch.enable_grad(), without_autocast(gradient.device):
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


def plain_output(
    terms: KernelTerms,
    value: torch.Tensor,
    query_length: int,
    mask: AttentionMask,
    dropout_factors: torch.Tensor | None,
) -> torch.Tensor:
    """The output of a kernel, with the same dropout, in differentiable operations: (B, Lq, H, d_v)."""
    logits = Explicit(_plain_logits(terms, value, query_length))
    output, weights = reference.reference_attention(logits, value, mask)
    if dropout_factors is not None:
        output = (weights * dropout_factors.to(weights.dtype)) @ value
    return output.transpose(1, 2)


def plain_normaliser(terms: KernelTerms, value: torch.Tensor, query_length: int, mask: AttentionMask) -> torch.Tensor:
    """log Σ exp of each row's logits in differentiable operations, (B, H, Lq): 0 where a row sees no key."""
    logits = _plain_logits(terms, value, query_length)
    visible = mask.visible(query_length, value.shape[2], value.device)
    if visible is None:
        return logits.logsumexp(-1)
    hidden = torch.finfo(logits.dtype).min
    return torch.where(visible.any(-1), logits.masked_fill(~visible, hidden).logsumexp(-1), 0.0)


def _plain_logits(terms: KernelTerms, value: torch.Tensor, query_length: int) -> torch.Tensor:
    """(B, H, Lq, Lk)."""
    shape = (*value.shape[:2], query_length, value.shape[2])
    distances = terms.distances(query_length, value.shape[2], value.device) if terms.has_distances else None
    return terms.logits(shape[-1], distances)[0].expand(shape)
