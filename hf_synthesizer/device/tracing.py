"""Whether the code runs, or is only recorded by a compiler."""

from __future__ import annotations

import torch

from ..upstream.torch_names import functorch_is_active


def traced() -> bool:
    """Whether operations are recorded or transformed (torch.compile, export, jit, func) and not just run.

    Then no tensor may be read, and no backward of our own be used.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or functorch_is_active()


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be read: not while a compiler records, nor on the meta device, where it holds nothing."""
    return not (torch.compiler.is_compiling() or tensor.is_meta)
