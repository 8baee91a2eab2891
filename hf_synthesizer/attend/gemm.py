"""Matrix products by the faster of the two libraries that PyTorch brings for the CPU.

`torch.mm` in float32 goes to MKL, which on some processors reaches less than half the speed of oneDNN (see
docs/performance.md). PyTorch itself reaches oneDNN in float32 through one operator, the one its compiler emits; it has no
derivative, so that only code that is its own backward may call this.
"""

from __future__ import annotations

import torch

# Below this many multiply-adds the operator's own cost outweighs its speed.
_SMALL = 1 << 21


def _one_dnn() -> object | None:
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_LINEAR = _one_dnn()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for (M, K) and (K, N), or for batches (g, M, K) and (g, K, N), without a derivative.

    `b` may be the transpose of a contiguous matrix.
    """
    if a.dim() == 3 and len(a) == 1:
        return product(a[0], b[0]).unsqueeze(0)
    if (
        a.dim() == 3
        or _LINEAR is None
        or a.device.type != "cpu"
        or a.dtype != torch.float32
        or a.numel() * b.shape[-1] < _SMALL
        or not torch.backends.mkldnn.enabled
    ):
        return a @ b
    if not a.is_contiguous():
        a = a.contiguous()
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # any other stride would send oneDNN to its reference code, a thousand times slower
    return _LINEAR(a, b.t(), None, "none", [], "")  # type: ignore[operator]
