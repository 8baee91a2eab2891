"""What stands in for a synthesizer whose static part is computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import inf
from typing import Any, cast

import torch
from torch import nn

from ..attend.static import MAX_RANGE
from ..errors import FusedModelError, FusedParameterError
from ..logits.forms import Logits, Static, StaticWeights, Sum
from ..logits.positions import Positions
from ..synthesizers import Synthesizer
from ..synthesizers.mixture import MixtureSynthesizer
from .compression import compress

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""Dtypes that hold e^−60 / N. Weights that are smaller than a dtype's smallest number are lost."""


class FusedSynthesizer(Synthesizer):
    """Computes the logits of `original` from what its parameters were made into.

    What was computed cannot become stale, because the parameters behind it are out of reach: `own` is a twin of the original
    with copies of them, which no module holds, and the original's are empty for as long. A state dict has them as they
    are, and one that is loaded goes through here, so that everything is computed again. What depends on the input is not
    copied: original, twin and this module share it, where others find it too.

    Where softmaxed weights cannot be told exactly, because a row's logits lie further apart than `MAX_RANGE` or the dtype is
    too narrow, logits are kept instead.
    """

    own: Synthesizer
    original: Synthesizer
    fused_weights: torch.Tensor | None
    fused_logits: torch.Tensor | None
    fused_left: torch.Tensor | None
    fused_right: torch.Tensor | None

    def __init__(self, original: Synthesizer, causal: bool, tolerance: float | None):
        nn.Module.__init__(self)
        self.variant = original.config.variant  # type: ignore[misc]
        self.config = original.config
        self.hidden_size = original.hidden_size
        self.num_heads = original.num_heads
        self.max_length = original.max_length
        self.head_dim = original.head_dim
        self.causal = causal
        self.tolerance = tolerance
        self.pure = _is_pure(original)
        live = _live_parts(original)
        if live:
            self.parts = nn.ModuleDict(live)
        # Not through __setattr__, which would make them submodules.
        self.__dict__["own"] = _twin(original, live)
        self.__dict__["original"] = original
        for name in ("weights", "logits", "left", "right"):
            self.register_buffer(f"fused_{name}", None, persistent=False)
        self.compute()
        self.eval()

    def compute(self) -> None:
        """Make everything again from the parameters."""
        self.rank: int | None = None
        self.error = 0.0
        self.spread = 0.0
        self.fused_weights = self.fused_logits = self.fused_left = self.fused_right = None
        with torch.no_grad():
            logits = cast(torch.Tensor, self.own.static_table())
            self.dtype = logits.dtype
            if self.pure:
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                if self.causal:
                    future = torch.ones(wide.shape[-2:], dtype=torch.bool, device=wide.device).triu(1)
                    wide = wide.masked_fill(future, -inf)
                self.spread = _spread(wide)
            if not self.pure or self.why_logits is not None:
                self.fused_logits = logits.contiguous()
                return
            weights = wide.softmax(-1)  # (H, N, N)
            if self.tolerance is not None and not self.causal:
                self.rank, self.error, left, right = compress(weights, self.tolerance)
                if left is not None and right is not None:
                    self.fused_left, self.fused_right = (
                        left.to(self.dtype).contiguous(),
                        right.to(self.dtype).contiguous(),
                    )
                    return
            self.fused_weights = weights.to(self.dtype).contiguous()

    @property
    def why_logits(self) -> str | None:
        """Why logits are kept and not their softmax, where nothing but the numbers speaks against it."""
        if self.dtype not in WEIGHT_DTYPES:
            return f"{str(self.dtype).removeprefix('torch.')} cannot hold small weights"
        if not self.spread <= MAX_RANGE:  # nor for NaN
            return f"a row's logits lie {self.spread:.0f} apart, and weights are exact up to {MAX_RANGE:.0f}"
        return None

    @property
    def what(self) -> str:
        """What was computed, for the report."""
        if self.fused_logits is None:
            return "weights"
        return "static logits" if not self.pure else f"static logits: {self.why_logits}"

    @property
    def key_width(self) -> int:
        return self.own.key_width

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.own.project_keys(hidden_states)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        """The original's logits.

        Raises:
            FusedModelError: in training.
        """
        if self.training:
            raise FusedModelError(
                "A fused model cannot be trained: its static attention weights are computed already. Call "
                "unfuse(model) before model.train()."
            )
        if positions.per_row:
            return self.own.synthesize(hidden_states, key_states, positions)
        terms = self.own.input_terms(hidden_states, key_states, positions)
        static = self._static_form(positions)
        return Sum([(None, static), *terms]) if terms else static

    def _static_form(self, positions: Positions) -> Logits:
        complete = self.causal or positions.key_length == self.max_length
        if self.fused_logits is not None:
            return Static(positions.queries(self.fused_logits)[..., : positions.key_length])
        if self.fused_weights is not None:
            table = positions.queries(self.fused_weights)[..., : positions.key_length]
            return StaticWeights(table, complete=complete, causal=self.causal, spread=self.spread)
        left = positions.queries(cast(torch.Tensor, self.fused_left))
        right = cast(torch.Tensor, self.fused_right)[..., : positions.key_length]
        return StaticWeights((left, right), complete=complete, causal=False, spread=self.spread)

    # ---- parameters, which are in `own` alone ----------------------------------------------------------------------

    def take_over(self) -> None:
        """Leave the original without the parameters that were copied."""
        for _, mine, theirs in self.copied():
            theirs.data = mine.data.new_empty(0)

    def give_back(self) -> Synthesizer:
        """The original, with its parameters."""
        for _, mine, theirs in self.copied():
            theirs.data = mine.data
        self.original.train(self.training)
        return self.original

    def copied(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The name of each copied parameter and buffer, the copy, and the original's."""
        for kind in ("named_parameters", "named_buffers"):
            theirs = dict(getattr(self.original, kind)(remove_duplicate=False))
            for name, tensor in getattr(self.own, kind)():
                if tensor is not theirs[name]:
                    yield name, tensor, theirs[name]

    def copied_parameters(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """The name of each parameter that is out of reach, the parameter, and whether it is one to train."""
        for name, mine, theirs in self.copied():
            if isinstance(theirs, nn.Parameter):
                yield name, mine, theirs.requires_grad

    def __getattr__(self, name: str) -> Any:
        if name in _members(self) and name not in self._modules:
            raise FusedParameterError(
                f"{name!r} is out of reach while its layer is fused, so that what was computed from it stays true. Call "
                f"unfuse(model) to read or to change it; state_dict() and load_state_dict() serve a fused model as well."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        held = name in self.__dict__ or name in self._buffers or name in self._modules
        if not held and name in _members(self):
            raise FusedParameterError(
                f"{name!r} cannot be replaced while its layer is fused. Call unfuse(model) first, and fuse again then."
            )
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The original's; of what was computed from, copies."""
        state_dict = self.own.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, _, _ in self.copied():
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].detach().clone()
        return state_dict

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Into the copies, even where tensors are to be assigned: what somebody else holds could change later."""
        live = tuple(f"parts.{name}." for name in _live_parts(self.own))  # loaded by themselves
        own = [
            name for name in state_dict if name.startswith(prefix) and not name.removeprefix(prefix).startswith(live)
        ]
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in own}
        try:
            found = self.own.load_state_dict(given, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
        else:
            missing_keys += [prefix + name for name in found.missing_keys if not name.startswith(live)]
            if strict:
                unexpected_keys += [prefix + name for name in found.unexpected_keys]
        finally:
            self.compute()

    def _apply(self, *args: Any, **kwargs: Any) -> FusedSynthesizer:
        for module in (self.own, self.original):
            module._apply(*args, **kwargs)
        super()._apply(*args, **kwargs)
        made = next(
            tensor for tensor in (self.fused_weights, self.fused_logits, self.fused_left) if tensor is not None
        )
        if made.dtype != self.dtype and not made.is_meta:
            self.compute()  # another dtype holds other numbers
        return self


def _live_parts(synthesizer: Synthesizer) -> dict[str, Synthesizer]:
    """The parts of a mixture of which nothing is computed in advance."""
    if not isinstance(synthesizer, MixtureSynthesizer):
        return {}
    with torch.no_grad():
        return {name: part for name, part in synthesizer.components() if part.static_table() is None}


def _twin(synthesizer: Synthesizer, live: dict[str, Synthesizer]) -> Synthesizer:
    """A copy that shares the live parts, and takes no gradient for the rest."""
    twin = copy.deepcopy(synthesizer, {id(part): part for part in live.values()})
    shared = {id(parameter) for part in live.values() for parameter in part.parameters()}
    for parameter in twin.parameters():
        if id(parameter) not in shared:
            parameter.requires_grad_(False)
    return twin


def _members(fused: FusedSynthesizer) -> set[str]:
    own = fused.__dict__.get("own")
    return set() if own is None else {*own._parameters, *own._buffers, *own._modules}


def _is_pure(synthesizer: Synthesizer) -> bool:
    """Whether all that is not static is key-side."""
    parts = [synthesizer, *(module for module in synthesizer.modules() if isinstance(module, Synthesizer))]
    leaves = [part for part in parts if not any(isinstance(child, nn.ModuleDict) for child in part.children())]
    return all(part.is_static or part.key_side for part in leaves)


def _spread(logits: torch.Tensor) -> float:
    """How far the logits that a row sees lie apart, at most."""
    seen = logits.masked_fill(logits == -inf, inf)
    return float((logits.amax(-1) - seen.amin(-1)).max())
