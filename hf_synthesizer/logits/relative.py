"""Logits by distance: one number for each distance between a key and its query, whatever the length of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..device.reading import DeviceRead, read_now
from ..device.tracing import readable
from .forms import Logits
from .positions import Positions, rows_in

if TYPE_CHECKING:
    from .masks import AttentionMask


class Relative(Logits):
    """`logits[b, h, i, j] = rows[b, h, i, clip(j − i, −D, D) + D] + sinks[h, j]`, sinks for the first tokens only.

    `rows`: (B or 1, H, Lq or 1, 2·D + 1). In a causal layer it is (B or 1, H, Lq or 1, D + 1), for the distances −D …
    0. With one row, the logits don't depend on the query. `sinks`: (H, s), for the tokens 0 … s − 1 of a row, or None.

    i and j are `positions`. `tokens` (B or 1, Lk) numbers the keys of a row from its first visible token: `with_mask`
    finds it.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        positions: Positions,
        causal: bool = False,
        sinks: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ):
        self.rows = rows
        self.positions = positions
        self.causal = causal
        self.sinks = sinks
        self.tokens = tokens
        self.query_length = positions.query_length

    @property
    def max_distance(self) -> int:
        """D."""
        columns = self.rows.shape[-1] - 1
        return columns if self.causal else columns // 2

    def with_mask(self, mask: AttentionMask) -> Relative:
        """The same logits, for sinks counted from the first token of each row that `mask` shows."""
        if self.sinks is None or self.tokens is not None:
            return self
        tokens = numbered_tokens(self.positions, mask, self.rows.device)
        return Relative(self.rows, self.positions, self.causal, self.sinks, tokens)

    def distances(self) -> torch.Tensor:
        """The column of `rows` for each pair: clip(j − i, −D, D or 0) + D, (B or 1, Lq, Lk)."""
        query, key = self.positions.numbers(self.rows.device)
        furthest = self.max_distance
        return (key[:, None, :] - query[:, :, None]).clamp(-furthest, 0 if self.causal else furthest) + furthest

    def sink_bias(self) -> torch.Tensor | None:
        """The logits of the first tokens, (B or 1, H, 1, Lk), 0 for all others; None without sinks."""
        if self.sinks is None:
            return None
        tokens = self.tokens
        if tokens is None:
            tokens = self.positions.numbers(self.sinks.device)[1]
        number = self.sinks.shape[-1]
        first = (tokens >= 0) & (tokens < number)  # (B or 1, Lk)
        bias = self.sinks[:, tokens.clamp(0, number - 1)].transpose(0, 1)  # (B or 1, H, Lk)
        return bias.masked_fill(~first[:, None], 0.0).unsqueeze(-2)

    def by_distance(self) -> torch.Tensor:
        """The logits without those of the sinks, (B or 1, H, Lq, Lk)."""
        columns = self.distances()
        batch = rows_in(self.rows, columns)
        columns = columns[:, None].expand(batch, self.rows.shape[1], -1, -1)
        rows = self.rows.expand(batch, -1, columns.shape[-2], -1)
        return rows.gather(-1, columns)

    def materialize(self) -> torch.Tensor:
        logits, bias = self.by_distance(), self.sink_bias()
        return logits if bias is None else logits + bias


def counts_indices(positions: Positions, mask: AttentionMask) -> bool:
    """Whether j − i is the difference between the indices of key and query, for all keys that `mask` shows.

    It is not if tokens between visible ones are hidden and position_ids do not count them. False if this cannot be
    read here.
    """
    if positions.tokens is not None:
        return False
    if not positions.per_row or positions.source is None:  # without a source, positions are from left padding
        return True
    if not readable(positions.source) or (mask.keep is not None and not readable(mask.keep)):
        return False
    name = ("indices", positions.key_length, id(mask.source))
    read = DeviceRead(positions.source, name, lambda: _read_indices(positions, mask))
    return bool(read_now(read)[0][0])


def _read_indices(positions: Positions, mask: AttentionMask) -> torch.Tensor:
    query, key = positions.numbers(positions.source.device)  # type: ignore[union-attr]
    shift = key - torch.arange(key.shape[-1], device=key.device)  # the same for all visible tokens of a row
    visible = torch.ones_like(key, dtype=torch.bool)
    if mask.keep is not None:
        visible = visible & mask.keep.any(2).any(1)
    lowest = shift.masked_fill(~visible, torch.iinfo(shift.dtype).max).amin(-1)
    highest = shift.masked_fill(~visible, torch.iinfo(shift.dtype).min).amax(-1)
    indices = torch.arange(query.shape[-1], device=query.device) + positions.start
    place = indices.clamp(max=shift.shape[-1] - 1)
    same = ((query - indices == shift[:, place]) | ~visible[:, place]).all()
    return ((lowest >= highest).all() & same).view(1).float()


def numbered_tokens(positions: Positions, mask: AttentionMask, device: torch.device) -> torch.Tensor:
    """The number of each key in its row, (B or 1, Lk), from 0 for the first token; negative for padding on the left.

    Known positions number the tokens already. Otherwise the first key that any query sees is the first token.
    """
    if positions.tokens is not None:
        return positions.tokens
    _, key = positions.numbers(device)
    if positions.per_row or mask.keep is None or positions.windowed:
        return key
    keep = mask.keep.any(2).any(1)  # (B or 1, Lk)
    return key - (keep.cumsum(-1) == 0).sum(-1, keepdim=True)
