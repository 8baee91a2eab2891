"""Matrix products and projections by the faster of the two matrix libraries that PyTorch brings for the processor.

`torch.mm` in float32 calls MKL, which on some processors reaches less than half the speed of oneDNN (see docs/performance.md).
PyTorch reaches oneDNN in float32 through one operator, which its compiler emits. The operator has no derivative, so `Projection`
adds it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..upstream.torch_names import has_hooks
from ..upstream.torch_names import mkldnn_linear as _LINEAR
from .processor import on_processor
from .tracing import traced

_SMALL = 1 << 21
"""Multiply-adds of a product. Below this number, the overhead of the operator is larger than its gain."""


@cache
def default_library_is_fast() -> bool:
    """Whether MKL, which `torch.mm` calls, is as fast as oneDNN: on the processors of its maker."""
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "GenuineIntel" in facts and torch.backends.mkl.is_available()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, for matrices or batches of them. Large products of single matrices go to oneDNN."""
    if traced():  # an exported program would keep a bound on the sizes that are compared
        return a @ b
    if a.dim() > 2 and a.dim() == b.dim() and a.shape[:-2].numel() == b.shape[:-2].numel() == 1:
        return product(a.flatten(0, -2), b.flatten(0, -2)).view(*a.shape[:-1], -1)
    if a.dim() > 2 or not _worth_it(a, b.shape[-1]):
        return a @ b
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return Projection.apply(a, b.t(), None)
    return _one_dnn_product(a, b.t(), None)


def _one_dnn_product(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`a weightᵀ + bias`. Other strides than those of a matrix and its transpose would make oneDNN a thousand times slower."""
    if not a.is_contiguous():
        a = a.contiguous()
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    return _LINEAR(a, weight, bias, "none", [], "")


def linear(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """`module(tensor)`, by oneDNN for a plain `nn.Linear` in float32 on a processor.

    Any other module is called: a subclass or a replacement (LoRA, quantization), a module with hooks or with its own `forward`
    (offloading). So is every module under autocast and in a traced graph. Transformers keeps some modules in float32 in a model of
    another dtype. A plain `nn.Linear` among them computes in its own dtype and returns the tensor's.
    """
    if _in_other_precision(module, tensor):
        return module(tensor.to(cast(torch.Tensor, module.weight).dtype)).to(tensor.dtype)
    if (
        type(module) is not nn.Linear
        or traced()  # first: an exported program would keep a bound on the sizes that are compared
        or not _worth_it(tensor, module.out_features)
        or type(tensor) not in (torch.Tensor, nn.Parameter)
        or not _is_plain(module)
        or torch.is_autocast_enabled("cpu")
    ):
        return module(tensor)
    return Projection.apply(tensor, module.weight, module.bias)


def _in_other_precision(module: nn.Module, tensor: torch.Tensor) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype != tensor.dtype
        and module.weight.is_floating_point()
        and not torch.is_autocast_enabled(tensor.device.type)
    )


class Projection(torch.autograd.Function):
    """`x Wᵀ + b` for x (…, d)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(tensor, weight)
        rows = tensor.reshape(-1, tensor.shape[-1])
        return _one_dnn_product(rows, weight, bias).view(*tensor.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_tensor, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(rows, weight).view_as(tensor) if needs_tensor else None,
            product(rows.t(), tensor.reshape(-1, tensor.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _worth_it(a: torch.Tensor, columns: int) -> bool:
    """Whether oneDNN may compute the product of `a` with a matrix of this many columns, and is faster."""
    return (
        _LINEAR is not None
        and on_processor(a.device)
        and a.dtype == torch.float32
        and a.numel() * columns >= _SMALL
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(module: nn.Linear) -> bool:
    """Whether a call of the module is `x Wᵀ + b` and nothing else."""
    if type(module.weight) is not nn.Parameter or "forward" in module.__dict__:
        return False
    return module.weight.dtype == torch.float32 and not has_hooks(module)
