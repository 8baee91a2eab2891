"""How large and how costly a module is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..attend import native
from ..inference.fused import FusedSynthesizer


def count_parameters(module: nn.Module, *, trainable_only: bool = True, biases: bool = True) -> int:
    """The number of weights in a module; a weight shared by two modules counts once.

    Args:
        module: any module.
        trainable_only: leave out frozen parameters (buffers, such as `fixed_random`'s table, are never counted).
        biases: count parameters called `bias`, or ending in `_bias`, too. The paper's counts leave them out.
    """
    fused = [part for part in module.modules() if isinstance(part, FusedSynthesizer)]
    out_of_reach = [entry for part in fused for entry in part.hidden_parameters()]
    named = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
    return sum(
        parameter.numel()
        for name, parameter, trainable in [*named, *out_of_reach]
        if (trainable or not trainable_only) and (biases or not name.endswith("bias"))
    )


def count_flops(module: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """The floating-point operations of one forward pass, by torch's own counter.

    It counts matrix products and attention kernels, a multiply-add as two, and nothing elementwise: neither softmax,
    nor the outer products of `factorized_dense`.
    """
    # The kernel of attention on CPUs, and the operator by which our own products reach oneDNN: the counter knows neither.
    known: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    if torch.backends.mkldnn.is_available():
        known[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with torch.no_grad(), native.left_out(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        module(*inputs, **kwargs)
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _linear_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows.numel() * weight[0]
