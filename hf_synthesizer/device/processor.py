"""Whether a device takes the routes of a processor, or those of all other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_forced = False


def on_processor(device: torch.device) -> bool:
    """Whether the routes of a processor serve this device, and not those of all others."""
    return device.type == "cpu" and not _forced


@contextmanager
def as_accelerator() -> Iterator[None]:
    """Let a processor take the routes of all other devices, which is how these are tested without one."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before
