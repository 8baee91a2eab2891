"""Reading small tensors from their device: now, or together with the next that is read.

To read a tensor is to wait for the device that computes it. So several are read at once, and the answers are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..upstream.torch_names import version_of


class DeviceRead(NamedTuple):
    """A question about a tensor, that its device answers.

    Attributes:
        tensor: what the question is about.
        name: tells the questions about one tensor apart.
        answer: computes the answer on the device: a 1-D tensor of numbers that float32 holds exactly.
    """

    tensor: torch.Tensor
    name: object
    answer: Callable[[], torch.Tensor]


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → {name: (its version then, the answer)}
_WAITING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the same, with answers that are still on their device
_LOCK = Lock()  # held while these are written to or iterated over: several threads may call one model


def read_now(*device_reads: DeviceRead) -> list[list[float]]:
    """The answers, in one transfer. They are kept as long as the tensor lives and nobody writes to it.

    A tensor of inference mode counts no writes, so that its answers are not kept.
    """
    answers = [_recall(_KNOWN, device_read) for device_read in device_reads]
    missing = [number for number, known in enumerate(answers) if known is None]
    if missing:
        asked = [(device_reads[n].tensor, device_reads[n].name, device_reads[n].answer()) for n in missing]
        for number, answer in zip(missing, _read(asked), strict=False):
            answers[number] = answer
    return answers  # type: ignore[return-value]


def read_later(device_read: DeviceRead) -> list[float] | None:
    """The answer if it is known; else None, and the next `read_now` on this device reads it too."""
    if device_read.tensor.is_inference():
        return None
    known = _recall(_KNOWN, device_read)
    if known is None and _recall(_WAITING, device_read) is None:
        _remember(_WAITING, device_read.tensor, device_read.name, device_read.answer())
    return known  # type: ignore[return-value]


def _read(asked: list[tuple[torch.Tensor, object, torch.Tensor]]) -> list[list[float]]:
    """The answers in `asked`, then all that wait on the same device, as numbers."""
    device = asked[0][2].device
    with _LOCK:
        for tensor, answers in list(_WAITING.items()):
            waiting = [(tensor, name, answer) for name, (_, answer) in answers.items() if answer.device == device]
            if waiting:
                del _WAITING[tensor]
                asked = asked + [entry for entry in waiting if answers[entry[1]][0] == version_of(tensor)]
    numbers = torch.cat([answer.detach().float() for _, _, answer in asked]).tolist()
    read, start = [], 0
    for tensor, name, answer in asked:
        read.append(numbers[start : start + len(answer)])
        start += len(answer)
        if not tensor.is_inference():
            _remember(_KNOWN, tensor, name, read[-1])
    return read


def _recall(book: WeakTensorKeyDictionary, device_read: DeviceRead) -> object | None:
    if device_read.tensor.is_inference():
        return None
    version, answer = book.get(device_read.tensor, {}).get(device_read.name, (None, None))
    return answer if version == version_of(device_read.tensor) else None


def _remember(book: WeakTensorKeyDictionary, tensor: torch.Tensor, name: object, answer: object) -> None:
    with _LOCK:
        book.setdefault(tensor, {})[name] = (version_of(tensor), answer)
