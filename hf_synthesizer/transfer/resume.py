"""A walk over a dataloader, and a training state, that can be left and taken up again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatchError, first_line
from .observe import Batch


class EndlessBatches:
    """The batches of a dataloader, epoch after epoch; `state_dict` says where it stands.

    Going on after a resume gives the batches that would have come, if the dataloader is deterministic but for torch's
    global generator or its own.
    """

    def __init__(self, dataloader: Iterable[Batch]):
        self.dataloader = dataloader
        self.generator = getattr(dataloader, "generator", None)
        self.iterator: Iterator[Batch] | None = None
        self.taken = 0
        self.start = self._generator_state()

    def _generator_state(self) -> dict[str, torch.Tensor]:
        state = {"global": torch.get_rng_state()}
        if isinstance(self.generator, torch.Generator):
            state["own"] = self.generator.get_state()
        return state

    def _begin(self) -> Iterator[Batch]:
        self.start, self.taken = self._generator_state(), 0
        self.iterator = iter(self.dataloader)
        return self.iterator

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        iterator = self._begin() if self.iterator is None else self.iterator
        try:
            batch = next(iterator)
        except StopIteration:
            batch = next(self._begin())
        self.taken += 1
        return batch

    def rewind(self) -> None:
        """Put the generators back to where they stood before the batches that this walk has drawn from the dataloader."""
        torch.set_rng_state(self.start["global"])
        if isinstance(self.generator, torch.Generator) and "own" in self.start:
            self.generator.set_state(self.start["own"])
        self.iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands."""
        return {"taken": self.taken, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another walk stood."""
        self.start = state["start"]
        self.rewind()
        self._begin()
        for _ in range(state["taken"]):
            next(self)


HELD = ("model", "optimizer", "scheduler", "batches", "stage", "step", "before", "judged_on", "seconds")
"""What the state of a transfer under way has."""


class TransferCheckpoint:
    """One file in `directory` that holds how far a transfer has come, and under which settings."""

    name = "transfer.pt"

    def __init__(self, directory: str | os.PathLike | None, settings: dict[str, Any]):
        self.path = None if directory is None else Path(directory) / self.name
        self.settings = json.loads(json.dumps(settings))

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None when there is none.

        Raises:
            CheckpointMismatchError: when it was saved under other settings, and for a file that is damaged.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            found = dict(json.loads(state["settings"]))
            missing = [] if state["report"] else [name for name in HELD if name not in state]
        except Exception as error:  # torch.load raises what each part of it raises
            raise self._damaged(first_line(error)) from error
        if missing:
            raise self._damaged(f"it holds no {missing[0]!r}")
        differing = sorted(key for key in {**found, **self.settings} if found.get(key) != self.settings.get(key))
        if differing:
            key = differing[0]
            raise CheckpointMismatchError(
                f"{self.path} holds a transfer with {key} = {found.get(key)!r}, but this one has "
                f"{self.settings.get(key)!r}. Call it with the same settings to go on, or remove the file to start again."
            )
        return state

    def _damaged(self, reason: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"{self.path} is truncated or damaged ({reason.rstrip('.')}). Remove it to start the transfer again."
        )

    def fill(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Give a model the weights of a saved state.

        Raises:
            CheckpointMismatchError: for the weights of another model.
        """
        try:
            model.load_state_dict(state["model"])
        except (RuntimeError, KeyError) as error:
            if isinstance(error, CheckpointMismatchError):
                raise
            raise self._damaged(f"its weights do not fit this {type(model).__name__}: {first_line(error)}") from error

    def save(self, state: dict[str, Any]) -> None:
        """Write the state; a run that ends while it writes leaves the older file whole."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        torch.save({**state, "settings": json.dumps(self.settings)}, temporary)
        temporary.replace(self.path)
