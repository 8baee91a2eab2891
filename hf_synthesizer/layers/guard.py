"""The guard of a patched layer: a tensor that no stock class accepts, and that says how the layer is patched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..device.tracing import traced
from ..errors import CheckpointMismatchError, UnsupportedModelError
from ..synthesizers.config import LayerConfig
from ..synthesizers.fingerprint import describe, describe_difference, fingerprint


class Guard(nn.Module):
    """Stands in a patched layer under the name of a projection that is gone, and holds one integer, its `weight` (1,).

    It does two things, wherever tensors go (a state dict, a checkpoint, an adapter, a part of a larger model):

    - A stock class does not mind what is missing: it would give the projection random weights, and a warning. What none
      accepts is a shape that does not fit, and no projection has the shape (1,).
    - Names and shapes do not tell `stride=2` from `stride=8`. The integer does: it is the `fingerprint` of the layer's
      configuration, and whoever brings another one is refused.

    An integer, so that `half()` and `to(dtype)` leave it alone; a buffer, so that nothing trains or counts it. It is
    compared when a state dict is loaded, when Transformers has filled a model (see `SynthesizerModelMixin`), when the
    module moves, and in the forward pass if the tensor was replaced since.

    Args:
        config: how the layer is patched.
        device: where the projection was.
    """

    weight: torch.Tensor

    def __init__(self, config: LayerConfig, device: torch.device | None = None):
        super().__init__()
        self.guarded = config
        self.register_buffer("weight", self._tensor(device))
        self.accepted = self.weight

    def _tensor(self, device: torch.device | None) -> torch.Tensor:
        return torch.tensor([fingerprint(self.guarded)], dtype=torch.int64, device=device)

    def renew(self) -> None:
        """Hold the layer's own fingerprint again."""
        self.weight = self.accepted = self._tensor(self.weight.device)

    def require(self, where: str) -> None:
        """Compare a tensor that has replaced the weight, if one has.

        Args:
            where: the layer, as the error calls it.

        Raises:
            CheckpointMismatchError: for the fingerprint of another patch.
        """
        if self.weight is not self.accepted and not traced() and _readable(self.weight):
            self._require_own(self.weight, where)
            self.renew()

    def _require_own(self, stored: torch.Tensor, where: str) -> None:
        expected = fingerprint(self.guarded)
        value = stored.double().item()
        # Somebody may have cast a whole state dict to another dtype.
        if value != torch.tensor(expected, dtype=torch.float64).to(stored.dtype).double().item():
            raise CheckpointMismatchError(
                f"The tensors for {where} belong to a layer that is patched in another way: "
                f"{describe_difference(self.guarded, int(value) if abs(value) < 2**53 else 0)} This layer is "
                f"{describe(self.guarded)}. Load the checkpoint of a model that was patched in the same way, or patch "
                f"this one as that one was (the field 'synthesizer' of its config.json says how)."
            )

    def require_in(self, state_dict: dict[str, Any], prefix: str) -> torch.Tensor | None:
        """Compare the fingerprint in a state dict, and return it; None if there is none that can be read.

        Raises:
            CheckpointMismatchError: for the fingerprint of another patch.
        """
        stored = state_dict.get(f"{prefix}weight")
        if not isinstance(stored, torch.Tensor) or stored.shape != self.weight.shape or not _readable(stored):
            return None
        self._require_own(stored, repr(prefix.removesuffix(".").rpartition(".")[0] or "this layer"))
        return stored

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = self.require_in(state_dict, prefix)
        if stored is not None:
            state_dict[f"{prefix}weight"] = self._tensor(stored.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if stored is not None:
            self.accepted = self.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Guard:
        self.require("this layer")  # what accelerate has just put here is moved at once
        super()._apply(fn, recurse)
        self.renew()  # `type()` casts integers as well, and `to_empty()` leaves whatever was in memory
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            "This projection is gone: the layer's logits are synthesized (its `synthesizer` makes them), and a guard for "
            "checkpoints has the projection's name."
        )

    def extra_repr(self) -> str:
        return f"stands where a projection was that {self.guarded.variant!r} has replaced or moved"


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a value here and now."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def require_tensors(state_dict: dict[str, Any], prefix: str, names: Sequence[str], beside: str) -> None:
    """Check that a state dict has the tensors of a synthesizer, wherever it has the layer's values (`beside`).

    Raises:
        CheckpointMismatchError: for one that has the values alone, as a stock model's has.
    """
    missing = [prefix + name for name in names if prefix + name not in state_dict]
    if missing and prefix + beside in state_dict:
        raise CheckpointMismatchError(
            f"The state dict has the values of the synthesized layer {prefix.removesuffix('.')!r} but not its "
            f"tensor {missing[0]!r}, so it belongs to a stock model or to another variant. Load the checkpoint of a "
            f"model that was patched in the same way, or load it into the stock model and patch that."
        )
