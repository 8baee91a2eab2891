"""Compute once what does not change any more: the attention weights of static layers, for inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..errors import FusedModelError
from ..logits import Logits, Static, StaticWeights, Sum
from ..positions import Positions
from ..synthesizers import Synthesizer


@dataclass(frozen=True)
class FusedLayer:
    """What became of one layer. `rank` is None where the whole matrix is kept; `error` is the largest row sum of
    |weights − compressed weights|, so that no output is off by more than `error` times the largest value."""

    name: str
    what: str
    rank: int | None
    error: float


@dataclass(frozen=True)
class FuseReport:
    """Every synthesized layer of a model, fused or left. Prints as a table."""

    layers: tuple[FusedLayer, ...]

    def __str__(self) -> str:
        rows = [("layer", "fused", "rank", "error")]
        rows += [(x.name, x.what, "" if x.rank is None else str(x.rank), f"{x.error:.1e}") for x in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


class FusedTable(nn.Module):
    """Stands in for what a synthesizer computes from its parameters alone.

    Its buffers are not saved: a checkpoint of a fused model is that of the model itself.
    """

    table: torch.Tensor | None
    left: torch.Tensor | None
    right: torch.Tensor | None

    def __init__(self, synthesizer: Synthesizer, causal: bool, tolerance: float | None):
        super().__init__()
        self.causal = causal
        self.versions: dict[int, int] = _versions(synthesizer)
        self.pure = _is_pure(synthesizer)
        self.rank: int | None = None
        self.error = 0.0
        self.spread = 0.0
        logits = cast(torch.Tensor, synthesizer.static_table())
        table, left, right = logits, None, None
        if self.pure:
            table = self._weights(logits)
            if tolerance is not None and not causal:
                self.rank, self.error, left, right = _compress(table, tolerance)
        keep = (None, left, right) if self.rank is not None else (table.to(logits.dtype).contiguous(), None, None)
        for name, tensor in zip(("table", "left", "right"), keep, strict=True):
            made = None if tensor is None else tensor.to(logits.dtype).contiguous()
            self.register_buffer(name, made, persistent=False)

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self.spread = float(logits.max() - logits.min())
        if self.causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        return logits.softmax(-1)  # (H, N, N)

    def forward(
        self,
        synthesizer: Synthesizer,
        hidden_states: torch.Tensor,
        key_states: torch.Tensor | None,
        positions: Positions,
    ) -> Logits:
        """The synthesizer's logits.

        Raises:
            FusedModelError: in training, or after the parameters changed.
        """
        if synthesizer.training:
            raise FusedModelError(
                "A fused model cannot be trained: its static attention weights are computed already. Call "
                "unfuse(model) before model.train()."
            )
        if not torch.compiler.is_compiling() and self._is_stale(synthesizer):
            raise FusedModelError(
                "The parameters of a fused layer changed after fuse_for_inference(model). Call unfuse(model), and fuse "
                "again when the parameters are final."
            )
        if positions.per_row:
            return synthesizer.synthesize(hidden_states, key_states, positions)
        terms = synthesizer.input_terms(hidden_states, key_states, positions)
        own = self._static_form(synthesizer, positions)
        return Sum([(None, own), *terms]) if terms else own

    def _is_stale(self, synthesizer: Synthesizer) -> bool:
        """Whether a parameter was written to since. In a copy, or after a move, all are new: these count from here on."""
        versions = _versions(synthesizer)
        if versions.keys() != self.versions.keys():
            self.versions = versions
        return versions != self.versions

    def _apply(self, *args: Any, **kwargs: Any) -> FusedTable:
        self.versions = {}  # a move to another device or dtype writes to the parameters as well
        return super()._apply(*args, **kwargs)

    def _static_form(self, synthesizer: Synthesizer, positions: Positions) -> Logits:
        complete = self.causal or positions.key_length == synthesizer.max_length
        if self.table is not None:
            table = positions.queries(self.table)[..., : positions.key_length]
            if not self.pure:
                return Static(table)
            return StaticWeights(table, complete=complete, causal=self.causal, spread=self.spread)
        left = positions.queries(cast(torch.Tensor, self.left))
        right = cast(torch.Tensor, self.right)[..., : positions.key_length]
        return StaticWeights((left, right), complete=complete, causal=False, spread=self.spread)


def fuse_for_inference(model: nn.Module, *, tolerance: float | None = None) -> FuseReport:
    """Compute the static part of every synthesized layer once, in place. `unfuse(model)` undoes it.

    Layers whose logits do not depend on the input (`random`, `fixed_random`, `factorized_random`, and these with
    `salience`) keep their softmaxed weights; in other mixtures the static parts become one table.

    Args:
        model: a patched model, or any module that holds `SynthesizerAttention` layers, in eval mode.
        tolerance: if given, a matrix of weights is kept as two thin factors where that changes no row by more than
            `tolerance` in sum, so that no output moves by more than `tolerance` times the largest value. The cost of such a
            layer grows with L, not L². Causal layers are never compressed: a triangle has full rank.

    Raises:
        FusedModelError: in train mode, when fused already, or when there is nothing to fuse.
    """
    if model.training:
        raise FusedModelError("fuse_for_inference is for inference: call model.eval() first.")
    found = [(name, module) for name, module in model.named_modules() if _holds_synthesizer(module)]
    if any(module.synthesizer.fused is not None for _, module in found):
        raise FusedModelError("This model is fused already. Call unfuse(model) first to fuse it anew.")
    layers, tables = [], []
    with torch.no_grad():
        for name, module in found:
            synthesizer = module.synthesizer
            if synthesizer.static_table() is None:
                layers.append(
                    FusedLayer(name, f"nothing: {synthesizer.config.variant} depends on the input", None, 0.0)
                )
                continue
            table = FusedTable(synthesizer, bool(getattr(module, "is_causal", False)), tolerance)
            tables.append((synthesizer, table))
            layers.append(FusedLayer(name, "weights" if table.pure else "static logits", table.rank, table.error))
    if not tables:
        raise FusedModelError(
            f"Nothing to fuse: none of the {len(found)} synthesized layers of this {type(model).__name__} has a part that "
            f"is the same for every input (random, fixed_random, factorized_random)."
        )
    for synthesizer, table in tables:
        synthesizer.fused = table
    return FuseReport(tuple(layers))


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse_for_inference`, in place; returns the same model."""
    for module in model.modules():
        if isinstance(module, Synthesizer):
            module.fused = None
    return model


def _holds_synthesizer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "synthesizer", None), Synthesizer)


def _is_pure(synthesizer: Synthesizer) -> bool:
    """Whether all that is not static is key-side."""
    parts = [synthesizer, *(module for module in synthesizer.modules() if isinstance(module, Synthesizer))]
    leaves = [part for part in parts if not any(isinstance(child, nn.ModuleDict) for child in part.children())]
    return all(part.is_static or part.key_side for part in leaves)


def _versions(synthesizer: Synthesizer) -> dict[int, int]:
    # A tensor made in inference mode has no version; nothing tells whether it was written to.
    return {
        id(tensor): 0 if tensor.is_inference() else tensor._version
        for tensor in synthesizer.state_dict(keep_vars=True).values()
    }


Compressed = tuple[int | None, float, torch.Tensor | None, torch.Tensor | None]
"""A rank, its error and the two factors; no rank where compression is not worth it."""


def _compress(weights: torch.Tensor, tolerance: float) -> Compressed:
    """The least rank whose error is within the tolerance.

    A few directions at a time, as long as they are few: a whole decomposition of a long table takes minutes. The error is
    that of the factors found, so that nothing is claimed of directions that were missed.
    """
    length = weights.shape[-1]
    directions = 16
    while directions <= length // 8:
        with torch.random.fork_rng(devices=[] if weights.device.type == "cpu" else None):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(weights, q=directions, niter=2)
        found = _least_rank(weights, u, s, v.transpose(-1, -2), tolerance)
        if found[0] is not None:
            return found
        directions *= 4
    u, s, vh = torch.linalg.svd(weights, full_matrices=False)
    # Above half of the length two factors cost more than the matrix.
    return _least_rank(weights, u, s, vh[:, : length // 2], tolerance)


def _least_rank(
    weights: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor, tolerance: float
) -> Compressed:
    low, high = 1, vh.shape[-2]
    best: Compressed = (None, 0.0, None, None)
    while low <= high:
        rank = (low + high) // 2
        left, right = u[..., :rank] * s[:, None, :rank], vh[:, :rank]
        error = max(
            float((own - factor @ columns).abs().sum(-1).max())
            for own, factor, columns in zip(weights, left, right, strict=True)
        )
        if error <= tolerance:
            best, high = (rank, error, left, right), rank - 1
        else:
            low = rank + 1
    return best
