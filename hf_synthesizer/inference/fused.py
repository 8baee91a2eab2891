"""The module that replaces a synthesizer while its static part is computed in advance."""

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
"""Dtypes that can represent e^−60 / N. In other dtypes small weights would become 0."""


class FusedSynthesizer(Synthesizer):
    """Computes the logits of `original` with a static part that was computed once.

    The computed tensors cannot become stale, because the parameters behind them are read-only. `frozen` is a copy of the
    original that is no submodule, and the original's copied parameters are empty until `unfuse`. `state_dict` returns
    the copies. `load_state_dict` loads into the copies and computes everything again. Parts that depend on the input are not
    copied: the original, `frozen` and this module share them.

    The module keeps softmaxed weights if these are exact. With a window, if the logits of a row span more than `MAX_RANGE`, or if
    the dtype is too narrow, it keeps logits.
    """

    frozen: Synthesizer
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
        self.__dict__["frozen"] = _frozen_copy(original, live)
        self.__dict__["original"] = original
        for name in ("weights", "logits", "left", "right"):
            self.register_buffer(f"fused_{name}", None, persistent=False)
        self.compute()
        self.eval()

    def compute(self) -> None:
        """Compute all fused tensors from the parameters."""
        self.rank: int | None = None
        self.error = 0.0
        self.spread = 0.0
        self.fused_weights = self.fused_logits = self.fused_left = self.fused_right = None
        with torch.no_grad():
            logits = cast(torch.Tensor, self.frozen.static_table())
            self.dtype = logits.dtype
            if self.pure:
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                if self.causal:
                    future = torch.ones(wide.shape[-2:], dtype=torch.bool, device=wide.device).triu(1)
                    wide = wide.masked_fill(future, -inf)
                self.spread = _largest_range(wide)
            if not self.pure or self.why_not_weights is not None:
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
    def why_not_weights(self) -> str | None:
        """Why the numbers do not allow softmaxed weights; None if they do."""
        if self.dtype not in WEIGHT_DTYPES:
            return f"{str(self.dtype).removeprefix('torch.')} cannot hold small weights"
        if self.config.options.get("window") is not None:
            return "a window divides other weights by their sum"
        if not self.spread <= MAX_RANGE:  # also True for NaN
            return f"a row's logits lie {self.spread:.0f} apart, and weights are exact up to {MAX_RANGE:.0f}"
        return None

    @property
    def what(self) -> str:
        """Name the fused tensors, for the report."""
        if self.fused_logits is None:
            return "weights"
        return "static logits" if not self.pure else f"static logits: {self.why_not_weights}"

    @property
    def key_width(self) -> int:
        return self.frozen.key_width

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.frozen.project_keys(hidden_states)

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        """Compute the logits of the original.

        Raises:
            FusedModelError: in training.
        """
        if self.training:
            raise FusedModelError(
                "A fused model cannot be trained: its static attention weights are constants. Call "
                "unfuse(model) before model.train()."
            )
        if positions.per_row:
            return self.frozen.synthesize(hidden_states, key_states, positions)
        terms = self.frozen.input_terms(hidden_states, key_states, positions)
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

    # ---- parameters, which only `frozen` has -----------------------------------------------------------------------

    def empty_original(self) -> None:
        """Empty the original's parameters that were copied."""
        for _, copied, original in self.copied_tensors():
            original.data = copied.data.new_empty(0)

    def restore_original(self) -> Synthesizer:
        """Return the original with its parameters filled again."""
        for _, copied, original in self.copied_tensors():
            original.data = copied.data
        self.original.train(self.training)
        return self.original

    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the name, the copy and the original of each copied parameter and buffer."""
        for kind in ("named_parameters", "named_buffers"):
            originals = dict(getattr(self.original, kind)(remove_duplicate=False))
            for name, tensor in getattr(self.frozen, kind)():
                if tensor is not originals[name]:
                    yield name, tensor, originals[name]

    def hidden_parameters(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the name, the copy and the original `requires_grad` of each parameter that is hidden while fused."""
        for name, copied, original in self.copied_tensors():
            if isinstance(original, nn.Parameter):
                yield name, copied, original.requires_grad

    def __getattr__(self, name: str) -> Any:
        if name in _frozen_members(self) and name not in self._modules:
            raise FusedParameterError(
                f"{name!r} is out of reach while its layer is fused: the fused weights were computed from it. Call unfuse(model) "
                f"to read or to change it; state_dict() and load_state_dict() work for a fused model too."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_attribute = name in self.__dict__ or name in self._buffers or name in self._modules
        if not is_attribute and name in _frozen_members(self):
            raise FusedParameterError(
                f"{name!r} cannot be replaced while its layer is fused. Call unfuse(model) first, and fuse again afterwards."
            )
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the original's state dict, with clones of the hidden tensors."""
        state_dict = self.frozen.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, _, _ in self.copied_tensors():
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
        """Load into the copies. `assign=True` copies too, because the caller could change a shared tensor later."""
        live = tuple(f"parts.{name}." for name in _live_parts(self.frozen))  # PyTorch loads these as submodules
        static_names = [
            name for name in state_dict if name.startswith(prefix) and not name.removeprefix(prefix).startswith(live)
        ]
        static_state = {name.removeprefix(prefix): state_dict.pop(name) for name in static_names}
        try:
            result = self.frozen.load_state_dict(static_state, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
        else:
            missing_keys += [prefix + name for name in result.missing_keys if not name.startswith(live)]
            if strict:
                unexpected_keys += [prefix + name for name in result.unexpected_keys]
        finally:
            self.compute()

    def _apply(self, *args: Any, **kwargs: Any) -> FusedSynthesizer:
        for module in (self.frozen, self.original):
            module._apply(*args, **kwargs)
        super()._apply(*args, **kwargs)
        fused = next(
            tensor for tensor in (self.fused_weights, self.fused_logits, self.fused_left) if tensor is not None
        )
        if fused.dtype != self.dtype and not fused.is_meta:
            self.compute()  # rounding depends on the dtype
        return self


def _live_parts(synthesizer: Synthesizer) -> dict[str, Synthesizer]:
    """Return the parts of a mixture that depend on the input."""
    if not isinstance(synthesizer, MixtureSynthesizer):
        return {}
    with torch.no_grad():
        return {name: part for name, part in synthesizer.components() if part.static_table() is None}


def _frozen_copy(synthesizer: Synthesizer, live: dict[str, Synthesizer]) -> Synthesizer:
    """Copy a synthesizer: share the live parts, and take no gradient for the rest."""
    frozen = copy.deepcopy(synthesizer, {id(part): part for part in live.values()})
    shared = {id(parameter) for part in live.values() for parameter in part.parameters()}
    for parameter in frozen.parameters():
        if id(parameter) not in shared:
            parameter.requires_grad_(False)
    return frozen


def _frozen_members(fused: FusedSynthesizer) -> set[str]:
    frozen = fused.__dict__.get("frozen")
    return set() if frozen is None else {*frozen._parameters, *frozen._buffers, *frozen._modules}


def _is_pure(synthesizer: Synthesizer) -> bool:
    """Whether each part is static or depends on the key alone."""
    parts = [synthesizer, *(module for module in synthesizer.modules() if isinstance(module, Synthesizer))]
    leaves = [part for part in parts if not any(isinstance(child, nn.ModuleDict) for child in part.children())]
    return all(part.is_static or part.key_side for part in leaves)


def _largest_range(logits: torch.Tensor) -> float:
    """The largest range of the visible logits of a row."""
    without_masked = logits.masked_fill(logits == -inf, inf)
    return float((logits.amax(-1) - without_masked.amin(-1)).max())
