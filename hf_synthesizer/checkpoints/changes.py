"""Whether the weights of a model changed since it was patched, from a few numbers of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..layers.patched import synthesized_layers

SAMPLE = 256
"""Numbers a parameter. A step of an optimizer moves nearly all of them; to keep them all would double the memory."""

Samples = dict[str, torch.Tensor]


def sample_weights(model: nn.Module) -> Samples:
    """Some numbers of each parameter that a patch does not replace, by the parameter's name."""
    return {name: _sample(parameter).clone() for name, parameter in _kept(model)}


def changed_weights(model: nn.Module, samples: Samples) -> list[str]:
    """The names of the parameters whose samples differ. A cast alone is no change."""
    return [
        name
        for name, parameter in _kept(model)
        if name in samples and not torch.equal(_sample(parameter), samples[name].to(parameter.device, parameter.dtype))
    ]


def _kept(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    patched = tuple(f"{name}.synthesizer." for name, _ in synthesized_layers(model))
    for name, parameter in model.named_parameters():
        # Meta tensors have no numbers, and those of subclasses (sharded, quantized) cannot be had one by one.
        if type(parameter) is nn.Parameter and not parameter.is_meta and not name.startswith(patched):
            yield name, parameter


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))]
