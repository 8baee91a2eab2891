"""How many weights a module has."""

from __future__ import annotations

from torch import nn

from .base import Synthesizer


def count_parameters(module: nn.Module, *, trainable_only: bool = True, biases: bool = True) -> int:
    """The number of weights in a module; a weight shared by two modules counts once.

    Args:
        module: any module.
        trainable_only: leave out frozen parameters (buffers, such as `fixed_random`'s table, are never counted).
        biases: count parameters called `bias`, or ending in `_bias`, too. The paper's counts leave them out.
    """
    synthesizers = [part for part in module.modules() if isinstance(part, Synthesizer)]
    out_of_reach = [entry for part in synthesizers for entry in part.hidden_parameters()]
    named = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
    return sum(
        parameter.numel()
        for name, parameter, trainable in [*named, *out_of_reach]
        if (trainable or not trainable_only) and (biases or not name.endswith("bias"))
    )
