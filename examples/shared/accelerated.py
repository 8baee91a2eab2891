"""Resume a training loop of accelerate from a saved state."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from hf_synthesizer.errors import DataError


def load_checkpoint(accelerator: Accelerator, named: str | None, output_dir: str, steps_an_epoch: int) -> int:
    """Load the state that `--resume_from_checkpoint` names, and return its number of finished steps. 0 without the flag.

    Raises:
        DataError: for a folder that `--checkpointing_steps` did not save.
    """
    if named is None:
        return 0
    path = Path(named)
    if named == "latest":
        saved = [p for p in Path(output_dir).glob("*_*") if p.is_dir() and _steps_of(p, steps_an_epoch) is not None]
        if not saved:
            return 0
        path = max(saved, key=lambda p: _steps_of(p, steps_an_epoch) or 0)
    steps = _steps_of(path, steps_an_epoch)
    if steps is None or not path.is_dir():
        raise DataError(f"{path} is no folder that --checkpointing_steps saved (step_100, epoch_0).")
    accelerator.print(f"going on from {path}")
    accelerator.load_state(str(path))
    return steps


def _steps_of(path: Path, steps_an_epoch: int) -> int | None:
    kind, _, number = path.name.partition("_")
    if kind not in ("step", "epoch") or not number.isdigit():
        return None
    return int(number) if kind == "step" else (int(number) + 1) * steps_an_epoch
