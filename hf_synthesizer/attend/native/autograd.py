"""The native kernels as a function that autograd knows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch

from ...logits.forms import Explicit, Tiled
from ...logits.masks import AttentionMask
from .. import reference
from ..recorded import gradients
from .build import Library, library
from .operands import KINDS, Plan, Problem, described, pointer, readable, room

Tensors = Sequence[torch.Tensor | None]


def attend(plan: Plan, tensors: Tensors) -> torch.Tensor:
    """The output (B, H, Lq, d_v), made as (B, Lq, H, d_v), which is how it is read."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return NativeAttention.apply(plan, *tensors).transpose(1, 2)
    return forward(plan, tensors)[0].transpose(1, 2)


def call(function: str, problem: Problem, *more: Any) -> None:
    made = cast(Library, library())
    if getattr(made.functions, function)(ctypes.byref(problem), *more):
        raise RuntimeError(
            f"The native kernel {function} of hf_synthesizer failed, most likely for want of memory. "
            f"HF_SYNTHESIZER_NATIVE=0 in the environment takes other routes."
        )


def forward(plan: Plan, tensors: Tensors, normaliser: torch.Tensor | None = None) -> tuple[torch.Tensor, Problem]:
    """The output (B, Lq, H, d_v), and the problem that was given to the kernels."""
    value = cast(torch.Tensor, tensors[0])
    output = value.new_empty(len(value), plan.query_length, value.shape[1], value.shape[-1])
    problem = plan.problem(tensors)
    problem.output = pointer("an output", output, output.shape, value.dtype)
    problem.normaliser = pointer("sums of rows", normaliser, (len(value), value.shape[1], plan.query_length))
    call("hf_forward", problem)
    return output, problem


class NativeAttention(torch.autograd.Function):
    """`forward`, with a backward that makes all logits again from one number a row."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: torch.Tensor | None) -> torch.Tensor:
        value = cast(torch.Tensor, tensors[0])
        normaliser = room(len(value), value.shape[1], plan.query_length)
        output, _ = forward(plan, tensors, normaliser)
        ctx.plan = plan
        ctx.save_for_backward(output, normaliser, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A hook on saved tensors may have given them another layout.
        output, normaliser, *tensors = map(readable, ctx.saved_tensors)
        plan, needed = ctx.plan, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # somebody wants a graph of this gradient
            return None, *gradients(lambda given: recorded(plan, given), tensors, needed, gradient)
        return None, *backward(plan, tensors, needed, gradient, output, normaliser)


def backward(
    plan: Plan,
    tensors: Tensors,
    needed: Sequence[bool],
    gradient: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
) -> list[torch.Tensor | None]:
    """The gradient of each tensor that needs one, from that of the output (B, Lq, H, d_v)."""
    value, query = cast(torch.Tensor, tensors[0]), tensors[1]
    batch, heads, keys, width = value.shape
    queries = plan.query_length
    problem = plan.problem(tensors, training=True)
    parts = problem.parts
    written = (batch, heads, queries, width)
    gradient, output = (readable(tensor).transpose(1, 2) for tensor in (gradient, output))  # (B, H, Lq, d_v)
    problem.gradient, problem.made = (
        described("a gradient", gradient, written),
        described("an output", output, written),
    )
    problem.normaliser = pointer("sums of rows", normaliser, written[:-1])
    value_grad = room(parts, batch, keys, heads, width)
    problem.value_gradient = value_grad.data_ptr()
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    if query is not None and (needed[1] or needed[2]):
        query_grad = room(batch, queries, heads, query.shape[-1])
        key_grad = room(parts, batch, keys, heads, query.shape[-1])
        problem.query_gradient, problem.key_gradient = query_grad.data_ptr(), key_grad.data_ptr()
    kept: list[tuple[int, torch.Tensor]] = []
    for number, (place, inner, outer) in enumerate(plan.outer_terms(tensors)):
        term = problem.outer[number]
        for name, at, factor in (("inner", place, inner), ("outer", place + 1, outer)):
            grads[at] = room(batch, heads, queries, factor.shape[-1])  # summed below where the factor has fewer
            setattr(term, f"{name}_gradient", cast(torch.Tensor, grads[at]).data_ptr())
    for number, (place, tensor, weight) in enumerate(plan.added_terms(tensors)):
        term = problem.added[number]
        if needed[place]:
            apart = tensor.shape[2] > 1  # each part of the queries has rows of its own, which the kernels write whole
            rows = 1 if len(tensor) == 1 and apart else batch
            dtype = tensor.dtype if apart and rows == batch else torch.float32  # that of a sum over the batch
            made = room(
                1 if apart else parts, rows, heads, queries if apart else 1, keys, dtype=dtype, zeros=not apart
            )
            strides = [0 if size == 1 else stride for size, stride in zip(made.shape, made.stride(), strict=True)]
            term.gradient, term.gradient_kind = made.data_ptr(), KINDS[dtype]
            term.gradient_part, term.gradient_batch, term.gradient_head, term.gradient_row = strides[:4]
            kept.append((place, made))
        if weight is not None and needed[place + 1]:
            made = room(parts, batch, heads, zeros=True)
            term.weight_gradient = made.data_ptr()
            kept.append((place + 1, made))
    call("hf_backward", problem)
    grads[0] = summed(value_grad).transpose(1, 2)
    if problem.query_gradient:
        grads[1], grads[2] = query_grad.transpose(1, 2), summed(key_grad).transpose(1, 2)
    for place, made in kept:
        grads[place] = summed(made) if made.dim() > 3 else made.sum((0, 1))
    return [
        None if grad is None or tensor is None or not need else grad.sum_to_size(tensor.shape).to(tensor.dtype)
        for grad, tensor, need in zip(grads, tensors, needed, strict=True)
    ]


def summed(parts: torch.Tensor) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def recorded(plan: Plan, tensors: Tensors) -> torch.Tensor:
    """What the kernels compute, dropout included, in operations that have derivatives of every order: (B, Lq, H, d_v)."""
    value, query, key = tensors[:3]
    assert value is not None
    shape = (*value.shape[:2], plan.query_length, value.shape[2])
    logits = torch.zeros(shape, device=value.device)
    if query is not None and key is not None:
        logits = logits + query @ key.transpose(-1, -2)
    for _, inner, outer in plan.outer_terms(tensors):
        logits = logits + Tiled(inner, outer, shape[-1]).materialize()
    for _, tensor, weight in plan.added_terms(tensors):
        logits = logits + (tensor if weight is None else tensor * weight[:, None, None])
    keep = plan.keep
    if plan.ends is not None:
        seen = (torch.arange(shape[-1], device=value.device) < plan.ends[:, None])[:, None, None]
        keep = seen if keep is None else keep & seen
    output, weights = reference.attend(Explicit(logits), value, AttentionMask(keep, None, plan.causal_offset))
    if plan.dropout:
        output = (weights * drawn(plan, tensors).to(weights.dtype)) @ value
    return output.transpose(1, 2)


def drawn(plan: Plan, tensors: Tensors) -> torch.Tensor:
    """What dropout does to each weight: 0, or 1 / (1 − p); (B, H, Lq, Lk)."""
    value = cast(torch.Tensor, tensors[0])
    made = room(*value.shape[:2], plan.query_length, value.shape[2])
    call("hf_dropout", plan.problem(tensors), ctypes.c_void_p(made.data_ptr()))
    return made
