"""Changes the precision of loaded weights, and their place in memory."""

from __future__ import annotations

import torch
from torch import nn

from ..layers.patched import synthesized_layers
from ..synthesizers.stock_weights import is_plain

ALIGNMENT = 64
"""In bytes: torch allocates at multiples of it. Some kernels round differently on other addresses."""


def unify_precision(model: nn.Module) -> None:
    """Give each synthesizer the precision of the rest of its layer, in place.

    Transformers keeps modules in float32 if their names contain certain letters, such as "wo" in T5. It does not mean ours.
    """
    for _, layer in synthesized_layers(model):
        synthesized = {id(parameter) for parameter in layer.synthesizer.parameters()}
        stock = [p for p in layer.parameters() if id(p) not in synthesized and p.dim() > 1 and is_plain(p)]
        dtype = next((p.dtype for p in stock if p.is_floating_point()), None)
        for tensor in (*layer.synthesizer.parameters(), *layer.synthesizer.buffers()):
            if dtype is not None and is_plain(tensor) and tensor.is_floating_point() and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def align_in_memory(model: nn.Module) -> None:
    """Copy tensors of a mapped file that do not start at a multiple of `ALIGNMENT`, in place.

    Without this a loaded model could differ from the saved one in the last bit of some outputs.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        plain = type(tensor) in (nn.Parameter, torch.Tensor)
        if plain and tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
