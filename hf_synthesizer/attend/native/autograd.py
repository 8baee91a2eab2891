"""The native kernels as an `autograd.Function`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch

from ..differentiable import differentiable_gradients, plain_normaliser, plain_output
from ..kernel_terms import KernelTerms, Tensors
from ..operand_checks import broadcast_strides
from ..terms import AddedTerm
from .build import Library, library
from .operands import KINDS, KernelArguments, KernelInputs, allocate, checked_pointer, kernel_layout, tensor_argument


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
        gradient = torch.zeros_like(output) if gradient is None else gradient
        if torch.is_grad_enabled():  # create_graph=True
            factors = dropout_factors(inputs, tensors) if inputs.dropout else None

            def compute(tensors: Tensors) -> torch.Tensor:
                terms, value = KernelTerms.from_tensors(tensors[1:], inputs.counts), cast(torch.Tensor, tensors[0])
                mask = inputs.plain_mask(value.shape[2])
                plain = plain_output(terms, value, inputs.query_length, mask, factors)
                if normaliser_gradient is None:
                    return plain
                logs = plain_normaliser(terms, value, inputs.query_length, mask)
                return torch.cat((plain.flatten(), logs.to(plain.dtype).flatten()))

            if normaliser_gradient is not None:
                gradient = torch.cat((gradient.flatten(), normaliser_gradient.to(gradient.dtype).flatten()))
            return None, *differentiable_gradients(compute, tensors, needed, gradient)
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
    value, terms = cast(torch.Tensor, tensors[0]), KernelTerms.from_tensors(tensors[1:], inputs.counts)
    needs: Any = KernelTerms.from_tensors(needed[1:], inputs.counts)  # type: ignore[arg-type]
    batch, heads, keys, width = value.shape
    queries = inputs.query_length
    arguments = inputs.arguments(tensors, training=True)
    parts = arguments.parts
    output_shape = (batch, heads, queries, width)
    gradient, output = (kernel_layout(tensor).transpose(1, 2) for tensor in (gradient, output))  # (B, H, Lq, d_v)
    arguments.output_gradient = tensor_argument("a gradient", gradient, output_shape)
    arguments.forward_output = tensor_argument("an output", output, output_shape)
    arguments.normaliser = checked_pointer("sums of rows", normaliser, output_shape[:-1])
    if normaliser_gradient is not None:
        normaliser_gradient = normaliser_gradient.float().contiguous()
        arguments.normaliser_gradient = checked_pointer("gradients of sums", normaliser_gradient, output_shape[:-1])
    value_grad = allocate(parts, batch, keys, heads, width)
    arguments.value_gradient = value_grad.data_ptr()
    query_grad, key_grad = None, None
    if terms.query is not None and (needs.query or needs.key):
        query_grad = allocate(batch, queries, heads, terms.query.shape[-1])
        key_grad = allocate(parts, batch, keys, heads, terms.query.shape[-1])
        arguments.query_gradient, arguments.key_gradient = query_grad.data_ptr(), key_grad.data_ptr()
    outer_grads = []
    for factors, pair in zip(arguments.outer, terms.outer_products, strict=False):
        inner_grad, outer_grad = (allocate(batch, heads, queries, factor.shape[-1]) for factor in pair)
        factors.inner_gradient, factors.outer_gradient = inner_grad.data_ptr(), outer_grad.data_ptr()
        outer_grads.append((inner_grad, outer_grad))
    added_grads = []
    for argument, (tensor, _, zero), need in zip(arguments.added, terms.added, needs.added, strict=False):
        sums, weight_sums = None, None
        if need.tensor:
            per_query = tensor.shape[2] > 1  # then each part of the queries writes its own rows
            rows = 1 if len(tensor) == 1 and per_query else batch
            summed = not per_query or rows < batch or zero is not None  # over the batch, queries or far keys
            dtype = torch.float32 if summed else tensor.dtype
            zeroed = not per_query or zero is not None or arguments.window > 0
            shape = (1 if per_query else parts, rows, heads, queries if per_query else 1, tensor.shape[-1])
            sums = allocate(*shape, dtype=dtype, zeros=zeroed)
            argument.gradient, argument.gradient_kind = sums.data_ptr(), KINDS[dtype]
            argument.gradient_zeroed = zeroed
            strides = broadcast_strides(sums)
            argument.gradient_part, argument.gradient_batch, argument.gradient_head, argument.gradient_row = strides
        if need.weight:
            weight_sums = allocate(parts, batch, heads, zeros=True)
            argument.weight_gradient = weight_sums.data_ptr()
        added_grads.append((sums, weight_sums))
    call_library("hf_backward", arguments)
    term_grads = KernelTerms(
        None if query_grad is None else query_grad.transpose(1, 2),
        None if key_grad is None else sum_of_parts(key_grad).transpose(1, 2),
        outer_grads,
        added=[
            AddedTerm(
                None if sums is None else sum_of_parts(sums),  # type: ignore[arg-type]
                None if weight_sums is None else weight_sums.sum((0, 1)),
            )
            for sums, weight_sums in added_grads
        ],
    )
    grads = [sum_of_parts(value_grad).transpose(1, 2), *term_grads.tensors()]
    # A tensor may have fewer rows of the batch, heads or queries than its gradient.
    return [
        None if grad is None or tensor is None or not need else grad.sum_to_size(tensor.shape).to(tensor.dtype)
        for grad, tensor, need in zip(grads, tensors, needed, strict=True)
    ]


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def dropout_factors(inputs: KernelInputs, tensors: Tensors) -> torch.Tensor:
    """The factor that dropout gives each weight: 0 or 1 / (1 − p), (B, H, Lq, Lk)."""
    value = cast(torch.Tensor, tensors[0])
    factors = allocate(*value.shape[:2], inputs.query_length, value.shape[2])
    call_library("hf_dropout", inputs.arguments(tensors), ctypes.c_void_p(factors.data_ptr()))
    return factors
