"""The native kernels as an `autograd.Function`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch

from ...logits.forms import Explicit, Tiled
from ...logits.masks import AttentionMask
from .. import reference
from ..differentiable import differentiable_gradients
from .build import Library, library
from .operands import KINDS, KernelArguments, KernelInputs, allocate, checked_pointer, kernel_layout, tensor_argument

Tensors = Sequence[torch.Tensor | None]


def attention_by_kernels(inputs: KernelInputs, tensors: Tensors) -> torch.Tensor:
    """The output (B, H, Lq, d_v), laid out as (B, Lq, H, d_v), which the output projection reads."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return NativeAttention.apply(inputs, *tensors)[0].transpose(1, 2)
    return native_output(inputs, tensors)[0].transpose(1, 2)


def attention_and_normalisers(inputs: KernelInputs, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_by_kernels`, and log Σ exp of each row's logits, (B, H, Lq): 0 where a row sees no key."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        output, normaliser = NativeAttention.apply(inputs, *tensors)
    else:
        value = cast(torch.Tensor, tensors[0])
        normaliser = allocate(len(value), value.shape[1], inputs.query_length)
        output, _ = native_output(inputs, tensors, normaliser)
    return output.transpose(1, 2), normaliser


def call_library(function: str, arguments: KernelArguments, *more: Any) -> None:
    kernels = cast(Library, library())
    if getattr(kernels.functions, function)(ctypes.byref(arguments), *more):
        raise RuntimeError(
            f"The native kernel {function} of hf_synthesizer failed, most likely because memory ran out. "
            f"Use a smaller batch, or set HF_SYNTHESIZER_NATIVE=0 in the environment to take other routes."
        )


def native_output(
    inputs: KernelInputs, tensors: Tensors, normaliser: torch.Tensor | None = None
) -> tuple[torch.Tensor, KernelArguments]:
    """The output (B, Lq, H, d_v), and the arguments of the kernels."""
    value = cast(torch.Tensor, tensors[0])
    output = value.new_empty(len(value), inputs.query_length, value.shape[1], value.shape[-1])
    arguments = inputs.arguments(tensors)
    arguments.output = checked_pointer("an output", output, output.shape, value.dtype)
    arguments.normaliser = checked_pointer(
        "sums of rows", normaliser, (len(value), value.shape[1], inputs.query_length)
    )
    call_library("hf_forward", arguments)
    return output, arguments


class NativeAttention(torch.autograd.Function):
    """`native_output`, with a backward that recomputes all logits from one number a row."""

    @staticmethod
    def forward(ctx: Any, inputs: KernelInputs, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        value = cast(torch.Tensor, tensors[0])
        normaliser = allocate(len(value), value.shape[1], inputs.query_length)
        output, _ = native_output(inputs, tensors, normaliser)
        ctx.inputs = inputs
        ctx.save_for_backward(output, normaliser, *tensors)
        ctx.set_materialize_grads(False)
        return output, normaliser

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, normaliser_gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Hooks on saved tensors may change the layout.
        output, normaliser, *tensors = map(kernel_layout, ctx.saved_tensors)
        inputs, needed = ctx.inputs, ctx.needs_input_grad[1:]
        if gradient is None:
            gradient = torch.zeros_like(output)
        if torch.is_grad_enabled():  # create_graph=True
            if normaliser_gradient is None:
                normaliser_gradient = torch.zeros_like(normaliser)
            both = torch.cat((gradient.flatten(), normaliser_gradient.to(gradient.dtype).flatten()))
            return None, *differentiable_gradients(
                lambda tensors: plain_results(inputs, tensors), tensors, needed, both
            )
        return None, *native_gradients(inputs, tensors, needed, gradient, output, normaliser, normaliser_gradient)


def native_gradients(
    inputs: KernelInputs,
    tensors: Tensors,
    needed: Sequence[bool],
    gradient: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    normaliser_gradient: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """The gradient of each needed tensor, given the gradient of the output (B, Lq, H, d_v)."""
    value, query = cast(torch.Tensor, tensors[0]), tensors[1]
    batch, heads, keys, width = value.shape
    queries = inputs.query_length
    arguments = inputs.arguments(tensors, training=True)
    parts = arguments.parts
    output_shape = (batch, heads, queries, width)
    gradient, output = (kernel_layout(tensor).transpose(1, 2) for tensor in (gradient, output))  # (B, H, Lq, d_v)
    arguments.output_gradient, arguments.forward_output = (
        tensor_argument("a gradient", gradient, output_shape),
        tensor_argument("an output", output, output_shape),
    )
    arguments.normaliser = checked_pointer("sums of rows", normaliser, output_shape[:-1])
    if normaliser_gradient is not None:
        normaliser_gradient = normaliser_gradient.float().contiguous()
        arguments.normaliser_gradient = checked_pointer("gradients of sums", normaliser_gradient, output_shape[:-1])
    value_grad = allocate(parts, batch, keys, heads, width)
    arguments.value_gradient = value_grad.data_ptr()
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    if query is not None and (needed[1] or needed[2]):
        query_grad = allocate(batch, queries, heads, query.shape[-1])
        key_grad = allocate(parts, batch, keys, heads, query.shape[-1])
        arguments.query_gradient, arguments.key_gradient = query_grad.data_ptr(), key_grad.data_ptr()
    partial_sums: list[tuple[int, torch.Tensor]] = []
    for position, (number, inner, outer) in enumerate(inputs.outer_terms(tensors)):
        term = arguments.outer[position]
        for name, factor_number, factor in (("inner", number, inner), ("outer", number + 1, outer)):
            # Summed below if the factor has fewer rows of the batch, heads or queries.
            grads[factor_number] = allocate(batch, heads, queries, factor.shape[-1])
            setattr(term, f"{name}_gradient", cast(torch.Tensor, grads[factor_number]).data_ptr())
    for position, (number, tensor, weight) in enumerate(inputs.added_terms(tensors)):
        term = arguments.added[position]
        if needed[number]:
            per_query = tensor.shape[2] > 1  # then each part of the queries writes its own rows
            rows = 1 if len(tensor) == 1 and per_query else batch
            relative, columns = inputs.is_relative(number, tensors), tensor.shape[-1]
            zeroed = not per_query or relative or inputs.window > 0
            dtype = (
                tensor.dtype if per_query and rows == batch and not relative else torch.float32
            )  # sums over the batch are in float32
            sums = allocate(
                1 if per_query else parts,
                rows,
                heads,
                queries if per_query else 1,
                columns,
                dtype=dtype,
                zeros=zeroed,
            )
            strides = [0 if size == 1 else stride for size, stride in zip(sums.shape, sums.stride(), strict=True)]
            term.gradient, term.gradient_kind, term.gradient_zeroed = sums.data_ptr(), KINDS[dtype], zeroed
            term.gradient_part, term.gradient_batch, term.gradient_head, term.gradient_row = strides[:4]
            partial_sums.append((number, sums))
        if weight is not None and needed[number + 1]:
            sums = allocate(parts, batch, heads, zeros=True)
            term.weight_gradient = sums.data_ptr()
            partial_sums.append((number + 1, sums))
    call_library("hf_backward", arguments)
    grads[0] = sum_of_parts(value_grad).transpose(1, 2)
    if arguments.query_gradient:
        grads[1], grads[2] = query_grad.transpose(1, 2), sum_of_parts(key_grad).transpose(1, 2)
    for number, sums in partial_sums:
        grads[number] = sum_of_parts(sums) if sums.dim() > 3 else sums.sum((0, 1))
    return [
        None if grad is None or tensor is None or not need else grad.sum_to_size(tensor.shape).to(tensor.dtype)
        for grad, tensor, need in zip(grads, tensors, needed, strict=True)
    ]


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def plain_results(inputs: KernelInputs, tensors: Tensors) -> torch.Tensor:
    """The kernels' output (B, Lq, H, d_v) and normalisers (B, H, Lq) as one vector, with the same dropout.

    The operations are PyTorch's, so that autograd can differentiate them again.
    """
    value, query, key = tensors[:3]
    assert value is not None
    shape = (*value.shape[:2], inputs.query_length, value.shape[2])
    logits = torch.zeros(shape, device=value.device)
    if query is not None and key is not None:
        logits = logits + query @ key.transpose(-1, -2)
    for _, inner, outer in inputs.outer_terms(tensors):
        logits = logits + Tiled(inner, outer, shape[-1]).materialize()
    for number, tensor, weight in inputs.added_terms(tensors):
        if inputs.is_relative(number, tensors):
            tensor = inputs.for_each_key(number, tensors, shape[-1])
        logits = logits + (tensor if weight is None else tensor * weight[:, None, None])
    keep = inputs.keep
    if inputs.ends is not None:
        seen = (torch.arange(shape[-1], device=value.device) < inputs.ends[:, None])[:, None, None]
        keep = seen if keep is None else keep & seen
    if inputs.window:
        near = inputs.within_reach(shape[-1])
        keep = near if keep is None else keep & near
    mask = AttentionMask(keep, None, inputs.causal_offset)
    output, weights = reference.reference_attention(Explicit(logits), value, mask)
    if inputs.dropout:
        output = (weights * dropout_factors(inputs, tensors).to(weights.dtype)) @ value
    visible = mask.visible(inputs.query_length, value.shape[2], value.device)
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    normaliser = logits.logsumexp(-1)
    if visible is not None:
        normaliser = torch.where(visible.any(-1), normaliser, 0.0)
    return torch.cat((output.transpose(1, 2).flatten(), normaliser.to(output.dtype).flatten()))


def dropout_factors(inputs: KernelInputs, tensors: Tensors) -> torch.Tensor:
    """The factor that dropout gives each weight: 0 or 1 / (1 − p), (B, H, Lq, Lk)."""
    value = cast(torch.Tensor, tensors[0])
    factors = allocate(*value.shape[:2], inputs.query_length, value.shape[2])
    call_library("hf_dropout", inputs.arguments(tensors), ctypes.c_void_p(factors.data_ptr()))
    return factors
