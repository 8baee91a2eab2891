"""`count_flops`: the floating-point operations of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..attend import native


def count_flops(module: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """The floating-point operations of one forward pass, by torch's counter.

    It counts matrix products and attention kernels, a multiply-add as two. It counts nothing elementwise, such as softmax or the
    outer products of `factorized_dense`.
    """
    # torch's counter does not know the attention kernel of CPUs, nor the operator that takes our products to oneDNN.
    formulas: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    if torch.backends.mkldnn.is_available():
        formulas[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with torch.no_grad(), native.without_kernels(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        module(*inputs, **kwargs)
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _linear_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows.numel() * weight[0]
