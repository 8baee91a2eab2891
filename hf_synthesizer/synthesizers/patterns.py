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
    """The seven patterns as log-probabilities, (7, N, N), so that softmax gives the pattern back.

    Each depends on j − i, or on j counted from the start. Softmax over the first L columns therefore renormalises the
    pattern to a sequence of L tokens: "toward the end" means the end of that sequence, not of the table. A query for
    which a pattern names no key (the first token's left context) looks at itself; a key that a pattern leaves out has 1e-6 instead of 0, whose logarithm is no number.
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
