"""Norms of queries and keys in layers that compare no tokens."""

from __future__ import annotations

import copy

from torch import nn

from ..synthesizers.config import LayerConfig
from .finding.layer_classes import NORMS


def set_norms_aside(layer: nn.Module, config: LayerConfig) -> None:
    """Turn the norms of queries and keys into buffers if no part of the logits compares tokens.

    The norms stay in checkpoints under their names. But no optimizer trains them, and DDP does not wait for their gradients, because
    nothing uses them. The stock layer keeps its own norms.
    """
    if "dot_product" in config.parts:
        return
    for name in NORMS & layer._modules.keys():
        norm = copy.deepcopy(layer._modules[name])
        for part in () if norm is None else norm.modules():
            for key, parameter in list(part.named_parameters(recurse=False)):
                del part._parameters[key]
                part.register_buffer(key, parameter.detach())
        layer._modules[name] = norm
