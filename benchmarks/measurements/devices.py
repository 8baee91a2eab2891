"""What differs from device to device when something is measured: waiting until it is done, and counting its memory."""

from __future__ import annotations

from typing import Any

import psutil
import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")


def module(device: str) -> Any:
    """`torch.cuda` and the like."""
    return torch.get_device_module(device)


def require(device: str) -> None:
    """Leave with a message where there is no such device."""
    if device != "cpu" and not (torch.accelerator.is_available() and module(device).is_available()):
        raise SystemExit(f"--device {device}: this torch ({torch.__version__}) finds no such device here.")


def name(device: str) -> str:
    """What is measured: `cuda: NVIDIA A100-SXM4-80GB`."""
    if device in ("cpu", "mps"):
        return device
    return f"{device}: {module(device).get_device_name()}"


def wait(device: str) -> None:
    """Until all that was asked of the device is done; a processor is done when the call returns."""
    if device != "cpu":
        module(device).synchronize()


def available_memory(device: str) -> int:
    """Bytes that can be had, on a processor without swapping."""
    if device == "cpu":
        return psutil.virtual_memory().available
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return module(device).mem_get_info()[0]


def reset_peak_memory(device: str) -> int:
    """Start to count, and give the bytes that tensors hold now. Not for a processor."""
    wait(device)
    module(device).empty_cache()
    if device == "mps":  # it counts no peak, but what it has once taken from the system it keeps until it is told
        return torch.mps.driver_allocated_memory()
    module(device).reset_peak_memory_stats()
    return module(device).memory_allocated()


def peak_memory(device: str) -> int:
    """The most bytes held since `reset_peak_memory`."""
    wait(device)
    return torch.mps.driver_allocated_memory() if device == "mps" else module(device).max_memory_allocated()
