"""Compresses attention weights to a product of two thin factors, within a tolerance."""

from __future__ import annotations

import torch

Compressed = tuple[int | None, float, torch.Tensor | None, torch.Tensor | None]
"""Rank, error and the two factors. The rank is None if compression saves nothing."""


def compress(weights: torch.Tensor, tolerance: float) -> Compressed:
    """Find the least rank whose error, the largest row sum of |weights − factors|, is within the tolerance.

    Randomized decompositions of 16, 64, … directions come first: a full decomposition of a long table takes minutes. The error
    is measured with the factors themselves, so it holds for an inexact decomposition too.
    """
    length = weights.shape[-1]
    directions = 16
    while directions <= length // 8:
        with torch.random.fork_rng(devices=[] if weights.device.type == "cpu" else None):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(weights, q=directions, niter=2)
        compressed = _least_rank(weights, u, s, v.transpose(-1, -2), tolerance)
        if compressed[0] is not None:
            return compressed
        directions *= 4
    u, s, vh = torch.linalg.svd(weights, full_matrices=False)
    # Above half of the length, two factors cost more than the matrix.
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
            float((head_weights - factor @ columns).abs().sum(-1).max())
            for head_weights, factor, columns in zip(weights, left, right, strict=True)
        )
        if error <= tolerance:
            best, high = (rank, error, left, right), rank - 1
        else:
            low = rank + 1
    return best
