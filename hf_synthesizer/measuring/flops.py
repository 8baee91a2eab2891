"""How many floating-point operations a forward pass takes."""

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
    """The floating-point operations of one forward pass, by torch's own counter.

    It counts matrix products and attention kernels, a multiply-add as two, and nothing elementwise: neither softmax,
    nor the outer products of `factorized_dense`.
    """
    # The kernel of attention on CPUs, and the operator by which our own products reach oneDNN: the counter knows neither.
    operators = {processor_attention: _attention_flops, mkldnn_linear: _linear_flops}
    known: dict[Any, Any] = {operator: count for operator, count in operators.items() if operator is not None}
    kernels = nullcontext() if processor_attention is not None else sdpa_kernel(SDPBackend.MATH)
    counter = FlopCounterMode(display=False, custom_mapping=known)
    with torch.no_grad(), native.without_kernels(), kernels, counter:
        module(*inputs, **kwargs)
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _linear_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows.numel() * weight[0]
