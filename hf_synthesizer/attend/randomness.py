"""The generator of a device, whatever the device: where it stands, and one that starts from there."""

from __future__ import annotations

import torch


def generator_state(tensor: torch.Tensor) -> torch.Tensor | None:
    """Where the default generator of a tensor's device stands; None for tensors without numbers, which draw none.

    The state is kept on the host: to read it waits for nothing.
    """
    device = tensor.device
    if device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def generator_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """A generator that draws what the default one drew from that state on."""
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator
