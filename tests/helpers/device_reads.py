"""Counts how often a host waits for what a device has computed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_synthesizer.attend.randomness import draw_seed

aten = torch.ops.aten
# Each has a result, or a result of a size, that the host has to be told.
ASKING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.repeat_interleave,
}
# These read memory without an operation that a dispatch mode would see.
READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


class Questions(TorchDispatchMode):
    """A context in which `count` grows with each question, and `places` names the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.reading = _Reading(self)

    @property
    def count(self) -> int:
        return len(self.places)

    def __enter__(self) -> Questions:
        self.reading.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reading.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed_by_mask = function.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if (function.overloadpacket in ASKING or indexed_by_mask) and not _draws_a_seed():
            self.places.append(str(function))
        return function(*args, **(kwargs or {}))


def _draws_a_seed() -> bool:
    """Whether the host reads a seed of its own: that is no question to a device, even where the processor plays one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not draw_seed.__code__:
        frame = frame.f_back
    return frame is not None


class _Reading(TorchFunctionMode):
    def __init__(self, device_reads: Questions) -> None:
        super().__init__()
        self.device_reads = device_reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.device_reads.count
        made = function(*args, **(kwargs or {}))
        if function in READING and self.device_reads.count == before:
            self.device_reads.places.append(function.__name__)
        return made
