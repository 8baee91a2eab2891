"""Batches and a training state that a later process can resume."""

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
    """The batches of a dataloader, epoch after epoch. `state_dict` saves the position.

    After `load_state_dict` the same batches follow, if the dataloader has no other randomness than torch's global
    generator and its own generator.
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
            state["dataloader"] = self.generator.get_state()
        return state

    def _begin_epoch(self) -> Iterator[Batch]:
        self.start, self.taken = self._generator_state(), 0
        self.iterator = iter(self.dataloader)
        return self.iterator

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        iterator = self._begin_epoch() if self.iterator is None else self.iterator
        try:
            batch = next(iterator)
        except StopIteration:
            batch = next(self._begin_epoch())
        self.taken += 1
        return batch

    def rewind(self) -> None:
        """Restore the generators to their state before this epoch."""
        torch.set_rng_state(self.start["global"])
        if isinstance(self.generator, torch.Generator) and "dataloader" in self.start:
            self.generator.set_state(self.start["dataloader"])
        self.iterator = None

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of batches taken in this epoch, and the generators at its start."""
        return {"taken": self.taken, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.start = state["start"]
        self.rewind()
        self._begin_epoch()
        for _ in range(state["taken"]):
            next(self)


STATE_KEYS = ("model", "optimizer", "scheduler", "batches", "stage", "step", "before", "judged_on", "seconds")
"""The keys of the state of an unfinished transfer."""


class TransferCheckpoint:
    """A file in `directory` with the state and the settings of a transfer."""

    name = "transfer.pt"

    def __init__(self, directory: str | os.PathLike | None, settings: dict[str, Any]):
        self.path = None if directory is None else Path(directory) / self.name
        self.settings = json.loads(json.dumps(settings))

    def load(self) -> dict[str, Any] | None:
        """Load the saved state; None without a file.

        Raises:
            CheckpointMismatchError: for a state of other settings, or a damaged file.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            saved_settings = dict(json.loads(state["settings"]))
            missing = [] if state["report"] else [name for name in STATE_KEYS if name not in state]
        except Exception as error:  # torch.load raises many kinds of errors
            raise self._damaged(first_line(error)) from error
        if missing:
            raise self._damaged(f"it holds no {missing[0]!r}")
        differing = sorted(
            key for key in {**saved_settings, **self.settings} if saved_settings.get(key) != self.settings.get(key)
        )
        if differing:
            key = differing[0]
            raise CheckpointMismatchError(
                f"{self.path} holds a transfer with {key} = {saved_settings.get(key)!r}, but this one has "
                f"{self.settings.get(key)!r}. Call it with the same settings to go on, or remove the file to start again."
            )
        return state

    def _damaged(self, reason: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"{self.path} is truncated or damaged ({reason.rstrip('.')}). Remove it to start the transfer again."
        )

    def load_weights(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Load the weights of a saved state into a model.

        Raises:
            CheckpointMismatchError: if they belong to another model.
        """
        try:
            model.load_state_dict(state["model"])
        except (RuntimeError, KeyError) as error:
            if isinstance(error, CheckpointMismatchError):
                raise
            raise self._damaged(f"its weights do not fit this {type(model).__name__}: {first_line(error)}") from error

    def save(self, state: dict[str, Any]) -> None:
        """Write the state. If the process ends while it writes, the previous file stays intact."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        torch.save({**state, "settings": json.dumps(self.settings)}, temporary)
        temporary.replace(self.path)
