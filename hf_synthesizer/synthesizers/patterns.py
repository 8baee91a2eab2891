"""Handcrafted attention patterns, as logits (after Raganato et al. 2020, arXiv 2002.10260)."""

from __future__ import annotations

import torch

PATTERNS = (
    "identity",
    "next token",
    "previous token",
    "left context",
    "right context",
    "toward the end",
    "toward the start",
)
_FLOOR = 1e-6


def handcrafted_logits(length: int) -> torch.Tensor:
    """The seven patterns as log-probabilities, (7, N, N): their softmax is the pattern.

    Each depends on j − i, or on j counted from the start. So softmax over the first L columns gives the same pattern
    for a sequence of L tokens: "toward the end" means the end of that sequence, not of the table. Where a pattern has
    no key for a query (the first token has no left context), the query attends to itself. A key outside a pattern has
    probability 1e-6, because log 0 is not finite.
    """
    query = torch.arange(length)[:, None]
    key = torch.arange(length)[None, :]
    distance = (key - query).double()
    patterns = torch.stack(
        [
            (distance == 0).double(),
            (distance == 1).double(),
            (distance == -1).double(),
            (distance < 0) / distance.abs().clamp(min=1),
            (distance > 0) / distance.clamp(min=1),
            (key + 1.0).double().pow(3).expand(length, -1),
            (key + 1.0).double().pow(-3).expand(length, -1),
        ]
    )  # (7, N, N)
    empty = patterns.sum(-1, keepdim=True) == 0
    patterns = torch.where(empty, patterns[:1], patterns)
    patterns = patterns / patterns.sum(-1, keepdim=True)
    return torch.where(patterns == 0, _FLOOR, patterns).log().to(torch.get_default_dtype())
