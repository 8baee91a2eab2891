"""What the package does with private names of PyTorch and accelerate; `REGISTER` says what each is for."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from . import REGISTER, look_up, unsupported

ACCELERATE_HOOK: Any = look_up("accelerate.hooks#_hf_hook")
ACCELERATE_FORWARD: Any = look_up("accelerate.hooks#_old_forward")
COMPILED_CALL: Any = look_up("torch.nn.modules.module#_compiled_call_impl")
COMPILED_MODEL: Any = look_up("torch._dynamo.eval_frame#_orig_mod")
KERNEL_SYMBOLS = tuple(path for path in REGISTER if path.startswith("libtorch_cpu.so:"))
"""The functions of PyTorch that the native kernels call, in the order of `hf_bind`."""

mkldnn_linear: Any = look_up("torch.ops.mkldnn._linear_pointwise") if torch.backends.mkldnn.is_available() else None
"""`x Wᵀ + b` by oneDNN, without a derivative: `mkldnn_linear(x, W, b, "none", [], "")`. None if there is none."""
processor_attention: Any = look_up("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")

_fused_choice: Any = look_up("torch._fused_sdp_choice")
_assert_async: Any = look_up("torch._assert_async")
_HOOKS: list[Any] = [
    look_up(path) for path in REGISTER if path.startswith("torch.nn.modules.module") and "hooks" in path
]
_GLOBAL_HOOKS = [hooks for hooks in _HOOKS if isinstance(hooks, dict)]


def _never() -> bool:
    return False


functorch_is_active = look_up("torch._C._are_functorch_transforms_active") or _never
"""Whether a transform of torch.func runs."""

if look_up("torch.Tensor._version") is None:

    def version_of(tensor: torch.Tensor) -> object:
        """Equal for two calls if nobody wrote to the tensor in between."""
        return object()

else:

    def version_of(tensor: torch.Tensor) -> object:
        """Equal for two calls if nobody wrote to the tensor in between."""
        return tensor._version


if look_up("torch.Tensor._base") is None:

    def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that a view belongs to; None for one that is no view."""
        return None

else:

    def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that a view belongs to; None for one that is no view."""
        return tensor._base


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks; True if PyTorch does not tell."""
    if None in _HOOKS:
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or any(_GLOBAL_HOOKS)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Check a condition on its device, in a graph too, without waiting for the answer.

    Raises:
        UnsupportedModelError: if PyTorch has no such check.
    """
    if _assert_async is None:
        raise unsupported("torch._assert_async")
    _assert_async(condition, message)


def has_fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
) -> bool:
    """Whether `scaled_dot_product_attention` takes a fused kernel for tensors such as these."""
    if query.device.type == "cuda":
        cuda = torch.backends.cuda
        arguments = cast(Any, cuda.SDPAParams)(query, key, value, mask, dropout, causal, False)
        return (
            cuda.can_use_flash_attention(arguments)
            or cuda.can_use_efficient_attention(arguments)
            or cuda.can_use_cudnn_attention(arguments)
        )
    try:
        return _fused_choice is not None and _fused_choice(query, key, value, mask, dropout, causal) != 0  # not MATH
    except (RuntimeError, NotImplementedError):  # this device has no choice of kernels
        return False
