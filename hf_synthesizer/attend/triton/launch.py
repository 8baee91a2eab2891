"""The launch of the kernels: their arguments, and their `autograd.Function`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton

from ..operand_checks import broadcast_strides, require_factors, require_operand
from .blocks import Blocks, Specialisation
from .forward import forward_kernel
from .keys_backward import keys_kernel
from .queries_backward import queries_kernel
from .table_backward import table_kernel

KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel, "table": table_kernel}


class Operands(NamedTuple):
    """The tensors that the kernels read. The tensors of a missing term are None.

    value (B, H, Lk, w), query (B, H, Lq, w) and key (B, H, Lk, w) have one dtype and one width of `WIDTHS`, and strides
    and addresses divisible by 16, except for the last stride, which is 1. table (H or 1, Lq, Lk) has the last stride 1,
    and weight (H,), inner (B, H, Lq, a), outer (B, H, Lq, b) and bias (1 or B, 1 or H, Lk) are contiguous float32.
    """

    value: torch.Tensor
    query: torch.Tensor | None
    key: torch.Tensor | None
    table: torch.Tensor | None
    weight: torch.Tensor | None
    inner: torch.Tensor | None
    outer: torch.Tensor | None
    bias: torch.Tensor


@dataclass(frozen=True)
class Launch:
    """Sizes, causality and dropout of one call of attention; runs its kernels."""

    specialisation: Specialisation
    batch: int
    heads: int
    query_length: int
    key_length: int
    a: int
    b: int
    causal_offset: int
    dropout: float
    seed: int

    def run(self, kernel: str, operands: Operands, grads: dict[str, torch.Tensor | None]) -> Any:
        """Call a kernel; `grads` are its outputs and further inputs.

        Raises:
            AttentionInputError: if the operands' shapes, dtypes or devices disagree.
        """
        self.require_operands(operands)
        specialisation = replace(self.specialisation, kernel=kernel)
        blocks = specialisation.blocks
        a, b = (self.a, self.b) if self.specialisation.tiled else (blocks.keys, 0)
        table_head, table_row = (0, 0) if operands.table is None else broadcast_strides(operands.table)
        bias_batch, bias_head = broadcast_strides(operands.bias)
        arguments = {
            **strided("value", operands.value),
            **strided("query", operands.query),
            **strided("key", operands.key),
            "table": operands.table,
            "table_head": table_head,
            "table_row": table_row,
            "weight": operands.weight,
            "inner": operands.inner,
            "outer": operands.outer,
            "bias": operands.bias,
            "bias_batch": bias_batch,
            "bias_head": bias_head,
            **grads,
            "batch": self.batch,
            "heads": self.heads,
            "query_length": self.query_length,
            "key_length": self.key_length,
            "a": a,
            "b": b,
            "causal_offset": self.causal_offset,
            "seed": self.seed,
            "dropped": round(self.dropout * 2**32),
            "scale": 1 / (1 - self.dropout),
            **specialisation.constants(),
        }
        return call_kernel(KERNELS[kernel], self.grid(kernel, blocks, a), arguments, blocks)

    def require_operands(self, operands: Operands) -> None:
        """Check the operands before a kernel gets their addresses."""
        (batch, heads), (queries, keys) = (self.batch, self.heads), (self.query_length, self.key_length)
        width, device, dtype = self.specialisation.width, operands.value.device, (self.specialisation.dtype,)
        float32 = (torch.float32,)
        if self.specialisation.tiled:
            require_factors(self.a, self.b, keys)
        for name, shape, dtypes, broadcast in (
            ("value", (batch, heads, keys, width), dtype, 0),
            ("query", (batch, heads, queries, width), dtype, 0),
            ("key", (batch, heads, keys, width), dtype, 0),
            ("table", (heads, queries, keys), float32, 1),
            ("weight", (heads,), float32, 0),
            ("inner", (batch, heads, queries, self.a), float32, 0),
            ("outer", (batch, heads, queries, self.b), float32, 0),
            ("bias", (batch, heads, keys), float32, 2),
        ):
            tensor = getattr(operands, name)
            if tensor is not None:
                require_operand(name, tensor, shape, device, dtypes, broadcast)

    def grid(self, kernel: str, blocks: Blocks, a: int) -> tuple[int, ...]:
        """The grid of programs: one for each head (of each row of the batch) and each tile that a kernel writes."""
        rows = triton.cdiv(self.query_length, blocks.rows)
        keys = triton.cdiv(a, blocks.keys) * triton.cdiv(self.key_length, a)
        if kernel == "table":
            return self.heads, rows, keys
        return self.batch * self.heads, keys if kernel == "keys" else rows


def call_kernel(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], blocks: Blocks) -> Any:
    """Call a kernel. Every launch goes through here."""
    return kernel[grid](**arguments, **compiler_options(blocks))


def compiler_options(blocks: Blocks) -> dict[str, Any]:
    """Options of the compiler. Fused multiply-add is explicit, because its default differs between versions."""
    return {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}


def strided(name: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    """A tensor (B, H, L, w) and its strides, as arguments."""
    strides = (0, 0, 0) if tensor is None else broadcast_strides(tensor)
    return {name: tensor, f"{name}_batch": strides[0], f"{name}_head": strides[1], f"{name}_row": strides[2]}


class KernelAttention(torch.autograd.Function):
    """`softmax(logits) @ value` by the kernels. The backward needs the output and one number a row."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, *operands: torch.Tensor | None) -> torch.Tensor:
        output, normaliser = kernel_output(launch, Operands(*operands))  # type: ignore[arg-type]
        ctx.launch = launch
        ctx.save_for_backward(output, normaliser, *operands)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, normaliser, *tensors = ctx.saved_tensors
        needed = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
        grads = kernel_gradients(ctx.launch, Operands(*tensors), output, normaliser, output_grad, needed)
        return None, *(grads.get(name) if needed[name] else None for name in Operands._fields)


def kernel_output(launch: Launch, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, Lq, w) and the logarithm (to base 2) of each row's sum, (B, H, Lq)."""
    value = operands.value
    output = value.new_empty(launch.batch, launch.query_length, launch.heads, value.shape[-1]).transpose(1, 2)
    normaliser = value.new_empty(launch.batch, launch.heads, launch.query_length, dtype=torch.float32)
    launch.run("forward", operands, {**strided("output", output), "normaliser": normaliser})
    return output, normaliser


def kernel_gradients(
    launch: Launch,
    operands: Operands,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    output_grad: torch.Tensor,
    needed: dict[str, bool],
) -> dict[str, torch.Tensor | None]:
    """The gradients of the operands, by name."""
    value, weight, table = operands.value, operands.weight, operands.table
    # The incoming gradient may have any strides; the copy has the output's layout, as the kernels need.
    output_grad = torch.empty_like(output).copy_(output_grad)
    delta = torch.linalg.vecdot(output_grad.float(), output.float())  # (B, H, Lq)
    common = {**strided("output_grad", output_grad), "normaliser": normaliser, "delta": delta}
    grads: dict[str, torch.Tensor | None] = {}

    if needed["value"] or needed["key"] or needed["bias"]:
        gradient_tensors = {
            "value_grad": value.new_empty(value.shape),
            "key_grad": None if operands.key is None else value.new_empty(operands.key.shape),
            "bias_grad": delta.new_empty(launch.batch, launch.heads, launch.key_length),
        }
        launch.run("keys", operands, {**common, **gradient_tensors})
        bias_grad = gradient_tensors["bias_grad"].sum_to_size(operands.bias.shape)
        grads |= {"value": gradient_tensors["value_grad"], "key": gradient_tensors["key_grad"], "bias": bias_grad}
    if needed["query"] or needed["inner"] or needed["outer"]:
        gradient_tensors = {
            "query_grad": None if operands.query is None else value.new_empty(operands.query.shape),
            "inner_grad": None if operands.inner is None else torch.empty_like(operands.inner),
            "outer_grad": None if operands.outer is None else torch.zeros_like(operands.outer),
        }
        launch.run("queries", operands, {**common, **gradient_tensors})
        grads |= {name.removesuffix("_grad"): grad for name, grad in gradient_tensors.items()}
    if table is not None and weight is not None and (needed["table"] or needed["weight"]):
        table_grad = delta.new_empty(launch.heads, launch.query_length, launch.key_length)
        launch.run("table", operands, {**common, "table_grad": table_grad})
        if needed["weight"]:
            grads["weight"] = torch.stack(
                [(grad * head_table.float()).sum() for grad, head_table in heads_of(table_grad, table)]
            )
        if needed["table"]:
            table_grad *= weight[:, None, None]
            grads["table"] = table_grad.sum_to_size(table.shape).to(table.dtype)
    return grads


def heads_of(table_grad: torch.Tensor, table: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient, table) of each head. One product for all heads would need as much memory as the table."""
    return [(grad, table[head if len(table) > 1 else 0]) for head, grad in enumerate(table_grad)]
