"""Perplexity and accuracy over tokens. They do not depend on batch sizes and the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn import functional
from transformers import EvalPrediction

IGNORED = -100
"""The label of a token that is not predicted."""


def sums(logits: torch.Tensor | tuple, labels: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """For each row the summed loss, the number of correct tokens, and the number of tokens, (B, 3).

    Args:
        logits: (B, L, vocabulary), or a tuple that starts with them.
        labels: (B, L); -100 is not counted.
        causal: whether the logits at a place predict the next token.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )  # (B, L)
    right = logits.argmax(-1) == labels
    return torch.stack([losses.sum(1), right.sum(1).to(losses), (labels != IGNORED).sum(1).to(losses)], dim=1)


def summing(*, causal: bool) -> Callable[..., torch.Tensor]:
    """A function for Trainer's `preprocess_logits_for_metrics`. It keeps three numbers for each row instead of all logits."""
    return partial(sums, causal=causal)


def perplexity(evaluation: EvalPrediction) -> dict[str, float]:
    """A function for Trainer's `compute_metrics`: exp of the mean loss of a token, and the share of correct tokens."""
    return perplexity_of(np.asarray(evaluation.predictions))


def perplexity_of(rows: np.ndarray) -> dict[str, float]:
    """Perplexity and accuracy from the rows of `sums`, (rows, 3)."""
    loss, right, count = rows.astype(np.float64).sum(0)
    return {"perplexity": float(np.exp(loss / count)), "accuracy": float(right / count), "tokens": int(count)}
