"""Whether the code runs, or is only watched; on what it runs; and reading tensors seldom.

To read a tensor is to wait for the device that computes it, so that on any other device than a processor it is done
rarely, and for several tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_forced = False


def traced() -> bool:
    """Whether operations are recorded or transformed (torch.compile, export, jit, func) and not just run.

    Then no tensor may be read, and no backward of our own be used.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be read: not while a compiler records, nor on the meta device, where it holds nothing."""
    return not (torch.compiler.is_compiling() or tensor.is_meta)


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


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts products on this device to; None where it is off, or where there is none."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which nothing on this device is cast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class DeviceRead(NamedTuple):
    """What is to be known of a tensor: `answer` makes a 1-D tensor of it, of numbers that float32 holds exactly.

    `name` tells the questions about one tensor apart.
    """

    tensor: torch.Tensor
    name: object
    answer: Callable[[], torch.Tensor]


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → {name: (its version then, the answer)}
_WAITING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the same, with answers that are still on their device
_LOCK = Lock()  # around what writes to these or goes through them, for models that serve several threads


def read_now(*device_reads: DeviceRead) -> list[list[float]]:
    """The answers, in one transfer: remembered as long as a tensor lives and is not written to.

    Nothing tells whether a tensor made in inference mode was written to, so that such a one is asked again.
    """
    found = [_recall(_KNOWN, device_read) for device_read in device_reads]
    missing = [number for number, known in enumerate(found) if known is None]
    if missing:
        asked = [(device_reads[n].tensor, device_reads[n].name, device_reads[n].answer()) for n in missing]
        for number, answer in zip(missing, _read(asked), strict=False):
            found[number] = answer
    return found  # type: ignore[return-value]


def read_later(device_read: DeviceRead) -> list[float] | None:
    """The answer if it is known; else None, and the next `read_now` brings it along."""
    if device_read.tensor.is_inference():
        return None
    known = _recall(_KNOWN, device_read)
    if known is None and _recall(_WAITING, device_read) is None:
        _remember(_WAITING, device_read.tensor, device_read.name, device_read.answer())
    return known  # type: ignore[return-value]


def _read(asked: list[tuple[torch.Tensor, object, torch.Tensor]]) -> list[list[float]]:
    """The answers asked for and then all that wait on the same device, as numbers."""
    device = asked[0][2].device
    with _LOCK:
        for tensor, answers in list(_WAITING.items()):
            waiting = [(tensor, name, answer) for name, (_, answer) in answers.items() if answer.device == device]
            if waiting:
                del _WAITING[tensor]
                asked = asked + [entry for entry in waiting if answers[entry[1]][0] == tensor._version]
    numbers = torch.cat([answer.detach().float() for _, _, answer in asked]).tolist()
    made, start = [], 0
    for tensor, name, answer in asked:
        made.append(numbers[start : start + len(answer)])
        start += len(answer)
        if not tensor.is_inference():
            _remember(_KNOWN, tensor, name, made[-1])
    return made


def _recall(book: WeakTensorKeyDictionary, device_read: DeviceRead) -> object | None:
    if device_read.tensor.is_inference():
        return None
    version, answer = book.get(device_read.tensor, {}).get(device_read.name, (None, None))
    return answer if version == device_read.tensor._version else None


def _remember(book: WeakTensorKeyDictionary, tensor: torch.Tensor, name: object, answer: object) -> None:
    with _LOCK:
        book.setdefault(tensor, {})[name] = (tensor._version, answer)
