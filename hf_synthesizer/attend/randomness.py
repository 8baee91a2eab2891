"""The state of a device's random generator, and a generator that starts from a saved state."""

from __future__ import annotations

import torch


def generator_state(tensor: torch.Tensor) -> torch.Tensor | None:
    """The state of the default generator of a tensor's device; None for meta and fake tensors.

    The state is a tensor on the host, so reading it does not wait for the device.
    """
    device = tensor.device
    if device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def generator_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """A new generator that repeats the default generator's draws from `state` on."""
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator
