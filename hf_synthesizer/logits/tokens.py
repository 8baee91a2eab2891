"""Which indices of a batch hold tokens, and their positions in their rows.

A rule that chooses keys must not choose padding, and padding must not change its choice. So a row reaches from its
first to its last token, its positions count from its first token, and its length does not depend on the rest of the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.tracing import traced
from .masks import AttentionMask
from .positions import Positions


@dataclass(frozen=True)
class Tokens:
    """The tokens among `key_length` keys, and the indices of `query_length` queries among them.

    `keep` (B or 1, Lk) is True for keys that any query sees; None if all indices hold tokens. Query i has the index
    `start + i`. `known_positions` are the tokens' positions if the mask cannot give them, because a window hides
    distant tokens.
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
        """From a mask: a key that no query sees is padding."""
        keep = None if mask.keep is None else mask.keep.any(2).any(1)
        if keep is None and traced():  # the number of tokens must not become a constant of the graph
            keep = torch.ones(1, key_length, dtype=torch.bool, device=device)
        return cls(query_length, key_length, start, keep, known_positions)

    def first(self) -> torch.Tensor | int:
        """The index (B or 1, 1) of each row's first token, or 0."""
        return 0 if self.keep is None else (self.keep.cumsum(-1) == 0).sum(-1, keepdim=True)

    def lengths(self, device: torch.device) -> torch.Tensor:
        """The number of indices from a row's first to its last token, both included: (B or 1, 1)."""
        if self.keep is None:
            return torch.full((1, 1), self.key_length, device=device)
        behind = (self.keep.flip(-1).cumsum(-1) == 0).sum(-1, keepdim=True)
        return (self.key_length - behind - self.first()).clamp(min=0)

    def query_indices(self, device: torch.device) -> torch.Tensor:
        """The index (1, Lq) of each query."""
        return (torch.arange(self.query_length, device=device) + self.start).unsqueeze(0)

    def positions(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of queries (B or 1, Lq) and keys (B or 1, Lk), known or counted from the row's first token."""
        if self.known_positions is not None:
            return self.known_positions.numbers(device)
        first = self.first()
        return self.query_indices(device) - first, torch.arange(self.key_length, device=device).unsqueeze(0) - first

    def queries(self, device: torch.device) -> torch.Tensor | None:
        """True for queries (B, Lq) that are tokens; None if all are."""
        if self.keep is None:
            return None
        return self.keep[:, self.query_indices(device)[0].clamp(max=self.key_length - 1)]
