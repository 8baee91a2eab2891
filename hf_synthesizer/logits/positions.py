"""The positions of queries and keys in their sequence.

Synthesized logits depend on positions, so a layer must know them exactly. In an encoder they are 0 … L−1. In a decoder
with a cache, queries start where the cache ends. In a left-padded batch, each row has its own start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.processor import on_processor
from ..device.reading import DeviceRead, read_now
from ..device.tracing import readable
from ..errors import SequenceTooLongError, UnsupportedModelError
from ..upstream.torch_names import assert_async
from .masks import AttentionMask


def span(tensor: torch.Tensor, start: int, length: int, dim: int) -> torch.Tensor:
    """`tensor[start : start + length]` along a dimension, as a view; the tensor itself if this is all of it.

    The gradient of a slice is a second tensor as large as the whole, which is expensive for a table of logits. Under
    torch.export the result is a copy: an exported slice would guard that it is shorter than the tensor, and refuse the
    longest sequence.
    """
    if exporting():
        return tensor.index_select(dim, start + torch.arange(length, device=tensor.device))
    if start == 0 and length == tensor.shape[dim]:
        return tensor
    return tensor.narrow(dim, start, length)


def rows_in(*tensors: torch.Tensor) -> int:
    """The batch size B of tensors (B or 1, …).

    Not `len`: in a graph with a dynamic batch, it is the constant batch size of the example.
    """
    return next((tensor.shape[0] for tensor in tensors if tensor.shape[0] != 1), 1)


def exporting() -> bool:
    """Whether torch.export or torch.jit is tracing. In old versions of torch, whether any tracing runs."""
    return torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


class Positions:
    """The positions of `query_length` queries and `key_length` keys.

    In the common case, positions are contiguous and the same for each row of the batch, and tables are sliced. Queries
    are at `start … start + query_length − 1` and keys at `0 … key_length − 1`. `start` is an int, or a scalar tensor if
    a static cache keeps its length on the device.

    Otherwise `query` (B, Lq) and `key` (B, Lk) hold each position, and tables are gathered for each row. `source` is the tensor
    that holds the queries' positions; it is the same for all layers.

    If the keys are some of a row's tokens (a cache has dropped others), `tokens` (B or 1, Lk) numbers them from the row's first
    visible token.
    """

    def __init__(
        self,
        query_length: int,
        key_length: int,
        start: int | torch.Tensor = 0,
        query: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        windowed: bool = False,
        tokens: torch.Tensor | None = None,
    ):
        self.query_length = query_length
        self.key_length = key_length
        self.start = start
        self.query = query
        self.key = key
        self.source = query if source is None else source
        self.windowed = windowed
        self.tokens = tokens
        self.required: int | None = None
        """A `max_length` for which these positions have passed `require`."""

    @classmethod
    def from_position_ids(
        cls,
        position_ids: torch.Tensor | None,
        query_length: int,
        key_length: int,
        start: int | torch.Tensor,
        mask: torch.Tensor | None = None,
        dropped: int = 0,
        windowed: bool = False,
    ) -> Positions:
        """From the `position_ids` (B or 1, Lq) of the queries. If they are contiguous, tables are sliced.

        Padding may have position −1 (OPT). It is clamped to 0; the mask hides it. The layer's `mask` gives the
        positions of cached keys: position_ids count either all tokens or only the visible ones (`_CachedKeys`).
        `dropped` is the number of tokens that the cache has dropped at its start. `windowed` says that the mask may
        hide distant tokens.

        Raises:
            UnsupportedModelError: if position_ids count the tokens in neither way.
        """
        if position_ids is None:
            return cls(query_length, key_length, start)
        cached: _CachedKeys | None = None
        if not (isinstance(start, int) and start == 0 and key_length == query_length):
            cached = _CachedKeys(position_ids, key_length, start, mask, dropped, windowed)
        if _are_contiguous(position_ids, start, mask, cached):
            return cls(query_length, key_length, start, windowed=windowed)
        query = position_ids.clamp(min=0)
        if cached is None:
            return cls(query_length, key_length, start, query, query, position_ids, windowed)
        key = cached.positions()
        indices = torch.arange(key_length, device=position_ids.device) - start
        new_key = position_ids[:, indices.clamp(0, query_length - 1)]  # positions of the new tokens
        key = torch.where((indices >= 0) & (indices < query_length), new_key, key)
        return cls(query_length, key_length, start, query, key.clamp(min=0), position_ids, windowed)

    @classmethod
    def from_left_padding(
        cls, mask: torch.Tensor | None, query_length: int, key_length: int, start: int | torch.Tensor
    ) -> Positions:
        """From the mask (B or 1, 1, Lq, Lk) of a layer: each row starts at its first visible key, after any padding."""
        if mask is None:
            return cls(query_length, key_length, start)
        visible = AttentionMask.from_tensor(mask)
        if readable(mask) and not any(visible.extents().first):
            return cls(query_length, key_length, start)
        keep = visible.keep.any(2).any(1)  # type: ignore[union-attr]
        offset = (keep.cumsum(-1) == 0).sum(-1, keepdim=True)  # (B or 1, 1)
        query = torch.arange(query_length, device=keep.device) + start - offset
        key = torch.arange(key_length, device=keep.device) - offset
        positions = cls(query_length, key_length, start, query.clamp(min=0), key.clamp(min=0))
        positions.source = None  # at most the last key's index: `require` needs no read
        return positions

    @property
    def per_row(self) -> bool:
        """Whether each row of the batch has its own positions."""
        return self.query is not None

    def numbers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions as tensors: of queries (B or 1, Lq) and of keys (B or 1, Lk)."""
        if self.query is not None and self.key is not None:
            return self.query, self.key
        query = (torch.arange(self.query_length, device=device) + self.start).unsqueeze(0)
        return query, torch.arange(self.key_length, device=device).unsqueeze(0)

    @property
    def at_the_end(self) -> bool:
        """Whether there is a single query, at the last index: no key follows it."""
        return (
            self.query_length == 1 and not isinstance(self.start, torch.Tensor) and self.key_length == self.start + 1
        )

    def within(self, max_length: int, device: torch.device) -> Positions:
        """The same positions, with key positions clamped to `max_length − 1`.

        A static cache may be longer than `max_length`. The mask hides its unused entries, so their logits do not
        matter.

        Raises:
            SequenceTooLongError: if a token is beyond `max_length`.
        """
        if self.required is not None and self.required <= max_length:
            return self  # checked before, by another part of a mixture
        self.require(max_length)
        if self.key_length <= max_length:
            self.required = max_length
            return self
        query, key = self.numbers(device)
        key = key.clamp(max=max_length - 1)
        inside = Positions(self.query_length, self.key_length, self.start, query, key, windowed=self.windowed)
        inside.required = max_length
        return inside

    def require(self, max_length: int) -> None:
        """Check that no token is beyond `max_length`.

        This counts tokens, not indices: a static cache has unused indices, and left padding takes some. A compiled
        graph cannot read a tensor here, and checks when it runs.

        Raises:
            SequenceTooLongError: if a token is beyond `max_length`.
        """
        traced = torch.compiler.is_compiling()
        if self.query is not None and readable(self.query):
            if self.source is None and self.key_length <= max_length:
                return  # from left padding: at most the last key's index
            ((_, largest),) = read_now(_position_read(self.query if self.source is None else self.source))
            if largest >= max_length:
                raise SequenceTooLongError(
                    f"position_ids name position {int(largest)}, but this synthesizer was built for "
                    f"N = max_length = {max_length} positions, 0 to {max_length - 1}. Pass smaller position_ids. "
                    f"{_length_advice(max_length, int(largest) + 1)}"
                )
            return
        if self.key_length <= max_length:
            return
        used = self.start + self.query_length
        if traced and isinstance(used, torch.Tensor):
            assert_async(used <= max_length, f"more than N = max_length = {max_length} positions")
        elif used > max_length:
            raise SequenceTooLongError(
                f"The sequence has length L = {int(used)}, but this synthesizer was built for at most "
                f"N = max_length = {max_length} positions. {_length_advice(max_length, int(used))}"
            )

    def queries(self, table: torch.Tensor) -> torch.Tensor:
        """The queries' rows of a table (H, N, …): (H, Lq, …), or (B, H, Lq, …) when `per_row`."""
        if self.query is not None:
            return table[:, self.query].transpose(0, 1)
        if isinstance(self.start, torch.Tensor):
            return table.index_select(1, self.start + torch.arange(self.query_length, device=table.device))
        return span(table, self.start, self.query_length, dim=1)

    def keys(self, table: torch.Tensor) -> torch.Tensor:
        """The keys' rows of a table (H, N, …): (H, Lk, …), or (B, H, Lk, …) when `per_row`."""
        if self.key is not None:
            return table[:, self.key].transpose(0, 1)
        return span(table, 0, self.key_length, dim=1)


def _length_advice(max_length: int, length: int) -> str:
    return (
        f"Truncate the input (tokenizer(..., truncation=True, max_length={max_length}); for a pipeline, pass truncation=True "
        f"and max_length={max_length} to its call; for SentenceTransformer, set max_seq_length = {max_length}), generate fewer "
        f"tokens, or patch the model again with patch_model(..., max_length={length}) and train it."
    )


def _position_read(position_ids: torch.Tensor) -> DeviceRead:
    """Reads (first position, largest position). The first is −1 unless all rows count up from it; padding may be −1."""

    def answer() -> torch.Tensor:
        start = position_ids[:1, :1]
        counted = start + torch.arange(position_ids.shape[-1], device=position_ids.device)
        first = torch.where(((position_ids == counted) | (position_ids < 0)).all(), start.view(1), -1)
        return torch.cat((first, position_ids.amax().view(1)))

    return DeviceRead(position_ids, "positions", answer)


class _CachedKeys(NamedTuple):
    """The keys before `start` of a step with a cache, and the position_ids of its new tokens."""

    position_ids: torch.Tensor
    key_length: int
    start: int | torch.Tensor
    mask: torch.Tensor | None
    dropped: int
    windowed: bool

    def positions(self) -> torch.Tensor:
        """The positions of the keys, (B or 1, Lk).

        If position_ids count all tokens, a key's position is its index. If they count only the visible tokens,
        `attention_mask.cumsum(-1) - 1`, positions count back from the first new token over visible keys. Both agree
        unless a hidden token lies between visible ones.
        """
        indices = torch.arange(self.key_length, device=self.position_ids.device)
        if self.mask is None:
            return indices - self.start + self.position_ids[:, :1]
        _, counted, counts_all = self.counted()
        return torch.where(counts_all, indices + self.dropped, counted)

    def counted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The visible cached keys (B, Lk), positions counted over them (B, Lk), rows that count all tokens (B, 1)."""
        indices = torch.arange(self.key_length, device=self.position_ids.device)
        keep = AttentionMask.from_tensor(self.mask).keep.any(2).any(1)  # type: ignore[union-attr]  # (B or 1, Lk)
        first = (keep & (indices >= self.start)).int().argmax(-1, keepdim=True)
        new = first.clamp(min=self.start) - self.start  # a row's first new token
        position = self.position_ids.expand(rows_in(self.position_ids, new), -1).gather(1, new)
        visible = keep & (indices < self.start)
        counted = position - visible.flip(-1).cumsum(-1).flip(-1)
        return visible, counted, new + self.start + self.dropped == position

    def unknown(self) -> torch.Tensor:
        """Whether the mask hides tokens between cached ones, and position_ids count in neither way: one bool."""
        visible, counted, counts_all = self.counted()
        before_start = torch.arange(self.key_length, device=self.position_ids.device) < self.start
        begun = visible.cumsum(-1) > 0
        gap = (begun & ~visible & before_start).any(-1, keepdim=True)
        first, hidden = counted[:, :1], (~begun & before_start).sum(-1, keepdim=True) + self.dropped
        fits = (first > 0) & (first <= hidden) | (first == 0) & (hidden == 0) if self.windowed else first == 0
        return (gap & ~counts_all & ~fits).any().view(1)

    def device_read(self) -> DeviceRead:
        """Reads `unknown`. A model may have two kinds of layers, with two masks."""
        return DeviceRead(self.position_ids, ("gap", id(self.mask), self.dropped), self.unknown)


_UNKNOWN_KEYS = (
    "The attention mask hides tokens between cached ones, and position_ids count neither all tokens nor the visible ones, "
    "so that the positions of the cached keys are unknown. For generate(), pad prompts on the left. For steps of your own, "
    "pass position_ids = (attention_mask.cumsum(-1) - 1)[:, -n:] for the n tokens of each step, or none in any of them."
)


def _are_contiguous(
    position_ids: torch.Tensor, start: int | torch.Tensor, mask: torch.Tensor | None, cached: _CachedKeys | None
) -> bool:
    """Whether position_ids are start, start + 1, … in each row; False if they cannot be read here.

    One read tells this, what the layer's mask is made of, and whether the positions of cached keys are known.

    Raises:
        UnsupportedModelError: if the positions of cached keys are unknown.
    """
    asks_for_keys = cached is not None and mask is not None
    if asks_for_keys and torch.compiler.is_compiling() and not exporting():
        assert_async(~cached.unknown()[0], _UNKNOWN_KEYS)  # type: ignore[union-attr]
    if not readable(position_ids):
        return False
    asks_for_keys = asks_for_keys and readable(mask)  # type: ignore[arg-type]
    if isinstance(start, torch.Tensor) and not on_processor(start.device):
        if asks_for_keys and read_now(cached.device_read())[0][0]:  # type: ignore[union-attr]
            raise UnsupportedModelError(_UNKNOWN_KEYS)
        return False
    device_reads = [_position_read(position_ids)]
    if asks_for_keys:
        device_reads.append(cached.device_read())  # type: ignore[union-attr]
    if mask is not None and mask.shape[-2] > 1:
        device_reads.append(AttentionMask.from_tensor(mask).device_read())
    answers = read_now(*device_reads)
    if answers[0][0] == int(start):
        return True
    if asks_for_keys and answers[1][0]:
        raise UnsupportedModelError(_UNKNOWN_KEYS)
    return False
