"""How many floating-point operations a forward pass takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..attend import native


def count_flops(module: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """The floating-point operations of one forward pass, by torch's own counter.

    It counts matrix products and attention kernels, a multiply-add as two, and nothing elementwise: neither softmax,
    nor the outer products of `factorized_dense`.
    """
    # The kernel of attention on CPUs, and the operator by which our own products reach oneDNN: the counter knows neither.
    known: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    if torch.backends.mkldnn.is_available():
        known[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with torch.no_grad(), native.without_kernels(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        module(*inputs, **kwargs)
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _linear_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows.numel() * weight[0]
