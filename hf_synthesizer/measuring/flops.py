"""`count_flops`: the floating-point operations of a forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..attend import native
from ..upstream.torch_names import mkldnn_linear, processor_attention


def count_flops(module: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """The floating-point operations of one forward pass, by torch's counter.

    It counts matrix products and attention kernels, a multiply-add as two. It counts nothing elementwise, such as softmax or the
    outer products of `factorized_dense`.
    """
    # torch's counter does not know the attention kernel of CPUs, nor the operator that takes our products to oneDNN.
    operators = {processor_attention: _attention_flops, mkldnn_linear: _linear_flops}
    formulas: dict[Any, Any] = {operator: count for operator, count in operators.items() if operator is not None}
    kernels = nullcontext() if processor_attention is not None else sdpa_kernel(SDPBackend.MATH)
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with torch.no_grad(), native.without_kernels(), kernels, counter:
        module(*inputs, **kwargs)
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _linear_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows.numel() * weight[0]
