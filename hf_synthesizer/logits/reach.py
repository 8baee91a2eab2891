"""How far a query sees: the keys near it and the first tokens of its row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .forms import Logits
from .masks import AttentionMask
from .positions import Positions, rows_in
from .relative import counts_indices, numbered_tokens


@dataclass(frozen=True)
class Reach:
    """Query i sees key j if |j − i| < `window`, or if j is one of the first `sinks` tokens of its row.

    `positions` says where i and j are. `tokens` (B or 1, Lk) numbers the keys of a row from its first visible token.
    """

    window: int
    sinks: int
    positions: Positions
    tokens: torch.Tensor

    def visible(self) -> torch.Tensor:
        """True where a query sees a key, (B or 1, 1, Lq, Lk)."""
        query, key = self.positions.numbers(self.tokens.device)
        near = (key[:, None, :] - query[:, :, None]).abs() < self.window
        first = (self.tokens >= 0) & (self.tokens < self.sinks)
        return (near | first[:, None, :]).unsqueeze(1)


class Windowed(Logits):
    """Logits of heads that see the keys less than `window` places away, and the first `sinks` tokens of a row."""

    def __init__(self, logits: Logits, window: int, sinks: int, positions: Positions):
        self.logits = logits
        self.window = window
        self.sinks = sinks
        self.positions = positions
        self.query_length = logits.query_length

    def restricted(self, mask: AttentionMask, device: torch.device) -> AttentionMask:
        """`mask`, and nothing beyond the reach of these heads."""
        tokens, positions = numbered_tokens(self.positions, mask, device), self.positions
        if positions.per_row and counts_indices(positions, mask):  # then the routes can skip distant keys
            tokens = _from_indices(tokens, mask)
            positions = Positions(positions.query_length, positions.key_length, positions.start)
        return mask.within(Reach(self.window, self.sinks, positions, tokens))

    def materialize(self) -> torch.Tensor:
        raise TypeError("Windowed logits need a mask: attend takes them apart with `restricted`.")


def _from_indices(tokens: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """The numbers of visible tokens, and those of hidden ones counted on from them: position_ids of padding may be anything."""
    index = torch.arange(tokens.shape[-1], device=tokens.device)
    last = index[-1:].unsqueeze(0)
    if mask.keep is not None:
        last = torch.where(mask.keep.any(2).any(1), index, 0).amax(-1, keepdim=True)  # (B or 1, 1)
    rows = rows_in(tokens, last)
    last = last.expand(rows, -1)
    return index + tokens.expand(rows, -1).gather(-1, last) - last
