"""Matrix products and projections by the faster of the two libraries that PyTorch brings for the CPU.

`torch.mm` in float32 goes to MKL, which on some processors reaches less than half the speed of oneDNN (see
docs/performance.md). PyTorch itself reaches oneDNN in float32 through one operator, the one its compiler emits; it has no
derivative, so that only code that is its own backward may call this.
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

# Below this many multiply-adds the operator's own cost outweighs its speed.
_SMALL = 1 << 21


@cache
def default_library_is_fast() -> bool:
    """Whether MKL, which `torch.mm` calls, is as fast as oneDNN: on the processors of its maker."""
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "GenuineIntel" in facts and torch.backends.mkl.is_available()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for (M, K) and (K, N), or for batches (g, M, K) and (g, K, N), without a derivative.

    `b` may be the transpose of a contiguous matrix.
    """
    if a.dim() == 3 and len(a) == 1:
        return product(a[0], b[0]).unsqueeze(0)
    if a.dim() == 3 or not _worth_it(a, b.shape[-1]):
        return a @ b
    if not a.is_contiguous():
        a = a.contiguous()
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # any other stride would send oneDNN to its reference code, a thousand times slower
    return _LINEAR(a, b.t(), None, "none", [], "")


def linear(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """`module(tensor)`; a plain `nn.Linear` in float32 on the CPU by oneDNN, with a derivative.

    What is more than that is called as it is: a subclass or a stand-in (LoRA, quantization), a module with hooks or with a
    `forward` of its own (offloading), autocast, and a graph that is being traced. A plain one in another precision than the
    model (Transformers keeps some in float32, by parts of their names) works in its own, and gives back the tensor's.
    """
    if _in_other_precision(module, tensor):
        return module(tensor.to(cast(torch.Tensor, module.weight).dtype)).to(tensor.dtype)
    if (
        type(module) is not nn.Linear
        or traced()  # before sizes are compared, of which an exported program would keep a bound
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
        made = _LINEAR(rows, weight.contiguous(), bias, "none", [], "")
        return made.view(*tensor.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_tensor, needs_weight, needs_bias = ctx.needs_input_grad
        # With a graph of the gradient (`create_graph=True`) this has to have a derivative itself.
        multiply = torch.matmul if torch.is_grad_enabled() else product
        return (
            multiply(rows, weight).view_as(tensor) if needs_tensor else None,
            multiply(rows.t(), tensor.reshape(-1, tensor.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _worth_it(a: torch.Tensor, columns: int) -> bool:
    """Whether oneDNN may and should make the product of `a` and so many columns."""
    return (
        _LINEAR is not None
        and on_processor(a.device)
        and a.dtype == torch.float32
        and a.numel() * columns >= _SMALL
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(module: nn.Linear) -> bool:
    """Whether a call of the module is `x Wᵀ + b`, and nothing more."""
    if type(module.weight) is not nn.Parameter or "forward" in module.__dict__:
        return False
    return module.weight.dtype == torch.float32 and not has_hooks(module)
