"""Which indices of a batch hold tokens, and where in its row each of them stands.

Attention that chooses its keys must know more than who may look at whom: padding must not be chosen, and must not move
what is chosen. So a row is what lies between its first and its last token, its positions count from its first token, and
its length is its own, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.tracing import traced
from ..logits.masks import AttentionMask
from ..logits.positions import Positions


@dataclass(frozen=True)
class Tokens:
    """The tokens among `key_length` keys, and the indices of `query_length` queries among them.

    `keep` (B or 1, Lk) is True where some query may look; None where all indices hold tokens. Query i stands on the index
    `start + i`. `known_positions` are the positions of tokens where a mask does not tell them, because a window hides what is behind it.
    """

    query_length: int
    key_length: int
    start: int | torch.Tensor
    keep: torch.Tensor | None
    known_positions: Positions | None = None

    @classmethod
    def of(
        cls,
        mask: AttentionMask,
        query_length: int,
        key_length: int,
        start: int | torch.Tensor,
        device: torch.device,
        known_positions: Positions | None = None,
    ) -> Tokens:
        """From a mask: a key that no query may look at is padding."""
        keep = None if mask.keep is None else mask.keep.any(2).any(1)
        if keep is None and traced():  # a count of tokens must not become a constant of the graph
            keep = torch.ones(1, key_length, dtype=torch.bool, device=device)
        return cls(query_length, key_length, start, keep, known_positions)

    def first(self) -> torch.Tensor | int:
        """The index (B or 1, 1) of each row's first token, or 0."""
        return 0 if self.keep is None else (self.keep.cumsum(-1) == 0).sum(-1, keepdim=True)

    def lengths(self, device: torch.device) -> torch.Tensor:
        """How many indices lie between a row's first and last token, both included: (B or 1, 1)."""
        if self.keep is None:
            return torch.full((1, 1), self.key_length, device=device)
        behind = (self.keep.flip(-1).cumsum(-1) == 0).sum(-1, keepdim=True)
        return (self.key_length - behind - self.first()).clamp(min=0)

    def query_indices(self, device: torch.device) -> torch.Tensor:
        """The index (1, Lq) of each query."""
        return (torch.arange(self.query_length, device=device) + self.start).unsqueeze(0)

    def positions(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Where queries (B or 1, Lq) and keys (B or 1, Lk) stand, counted from the row's first token unless they are known."""
        if self.known_positions is not None:
            return self.known_positions.numbers(device)
        first = self.first()
        return self.query_indices(device) - first, torch.arange(self.key_length, device=device).unsqueeze(0) - first

    def queries(self, device: torch.device) -> torch.Tensor | None:
        """Which queries (B, Lq) stand on a token; None where all do."""
        if self.keep is None:
            return None
        return self.keep[:, self.query_indices(device)[0].clamp(max=self.key_length - 1)]
