"""The attention mask: visible keys, an additive bias, causality.

Transformers gives each attention backend its own kind of mask (eager: a float tensor; sdpa: a bool tensor or None),
with a number for each query and key. `attend` takes an `AttentionMask`, which detects the structure of a mask. Most are
a mask of keys, with or without a causal triangle. Neither needs L² numbers in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..device.processor import on_processor
from ..device.reading import DeviceRead, read_now
from ..device.tracing import traced
from ..errors import AttentionInputError

if TYPE_CHECKING:
    from .reach import Reach


class Extents(NamedTuple):
    """The visible keys of each row of the batch: the first index, the last index + 1, and their number.

    A row without visible keys has 0, 0 and 0.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    seen: tuple[int, ...]

    def of(self, row: int) -> tuple[int, int]:
        """(first, last + 1) of a row. A mask with one row serves all rows."""
        number = row if len(self.first) > 1 else 0
        return self.first[number], self.last[number]

    def has_holes(self, row: int) -> bool:
        """Whether a row hides a key between its first and its last visible key."""
        return self._hidden(row, self.of(row)[0])

    def hides_one(self, row: int) -> bool:
        """Whether a row hides a key before its last visible key."""
        return self._hidden(row, 0)

    def _hidden(self, row: int, first: int) -> bool:
        return self.seen[row if len(self.seen) > 1 else 0] < self.of(row)[1] - first


class AttentionMask:
    """`keep` (B or 1, H or 1, Lq or 1, Lk) is True where a query sees a key; a `bias` of such a shape is added.

    With `causal_offset` = p, query i sees the keys j ≤ i + p, without a mask tensor. `source` is the tensor from which
    `keep` was made. It is the same for all layers, so reads of `keep` are cached under it. With a `reach`, a query sees
    only keys near it and the first tokens of its row.
    """

    def __init__(
        self,
        keep: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        causal_offset: int | torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        reach: Reach | None = None,
    ):
        self.keep = keep
        self.bias = bias
        self.causal_offset = causal_offset
        self.source = keep if source is None else source
        self.reach = reach
        self.known_extents: Extents | None = None

    @classmethod
    def from_tensor(cls, mask: torch.Tensor | None, causal_offset: int | torch.Tensor | None = None) -> AttentionMask:
        """From a bool mask (True: visible) or an additive mask (the dtype's minimum or −inf: hidden).

        Raises:
            AttentionInputError: if the mask has integers, which could mean either.
        """
        if mask is None or mask.dtype == torch.bool:
            return cls(keep=mask, causal_offset=causal_offset)
        if not mask.is_floating_point():
            raise AttentionInputError(
                f"An attention mask of {str(mask.dtype).removeprefix('torch.')} was given, of shape {tuple(mask.shape)}. Pass "
                f"a bool mask (True: visible), or a floating-point mask, which is added to the logits. Call mask.bool()."
            )
        keep = mask > torch.finfo(mask.dtype).min / 2
        return cls(keep=keep, bias=mask.masked_fill(~keep, 0.0), causal_offset=causal_offset, source=mask)

    def with_bias(self, bias: torch.Tensor | None) -> AttentionMask:
        """The same mask, with `bias` added to its bias."""
        if bias is None:
            return self
        total = bias if self.bias is None else self.bias + bias
        mask = AttentionMask(self.keep, total, self.causal_offset, self.source, self.reach)
        mask.known_extents = self.known_extents
        return mask

    def expanded_to(self, shape: Sequence[int]) -> AttentionMask:
        """The same mask with four dimensions and all keys; it broadcasts to `shape`, (B, H, Lq, Lk).

        Raises:
            AttentionInputError: if the mask does not broadcast to `shape`.
        """
        keep, bias = (None if tensor is None else _expanded(tensor, shape) for tensor in (self.keep, self.bias))
        if keep is self.keep and bias is self.bias:
            return self
        mask = AttentionMask(keep, bias, self.causal_offset, self.source, self.reach)
        mask.known_extents = self.known_extents if keep is self.keep else None
        return mask

    def within(self, reach: Reach | None) -> AttentionMask:
        """The same mask with this reach, which hides distant keys; None for no limit."""
        mask = AttentionMask(self.keep, self.bias, self.causal_offset, self.source, reach)
        mask.known_extents = self.known_extents
        return mask

    def without_reach(self) -> AttentionMask:
        """The same mask, with the reach as a part of `keep`: (B or 1, H or 1, Lq, Lk)."""
        if self.reach is None:
            return self
        near = self.reach.visible()
        return AttentionMask(near if self.keep is None else self.keep & near, self.bias, self.causal_offset)

    def visible(self, query_length: int, key_length: int, device: torch.device) -> torch.Tensor | None:
        """`keep`, reach and causality as one bool tensor, or None if all queries see all keys."""
        if self.reach is not None:
            return self.without_reach().visible(query_length, key_length, device)
        if self.causal_offset is None:
            return self.keep
        query = torch.arange(query_length, device=device)[:, None] + self.causal_offset
        triangle = torch.arange(key_length, device=device) <= query  # (Lq, Lk)
        return triangle[None, None] if self.keep is None else self.keep & triangle

    def simplified(self) -> AttentionMask:
        """The same mask, as a mask of keys (…, 1, Lk) and a causal offset if these suffice.

        Reads the tensor once for each mask (in inference mode, once for each layer). Not for compiled graphs.
        """
        if self.keep is None or self.keep.shape[-2] == 1 or self.causal_offset is not None or self.keep.is_meta:
            return self
        keys = self.keep[..., -1:, :]  # the last query sees the most keys
        if self.keep.stride(-2) == 0 and not on_processor(self.keep.device) and self.keep.is_inference():
            return AttentionMask(keys, self.bias, reach=self.reach)
        same_keys, triangle, complete, extents = self._structure()
        if not (same_keys or triangle):
            return self
        offset = None if same_keys else self.keep.shape[-1] - self.keep.shape[-2]
        mask = AttentionMask(None if complete else keys, self.bias, offset, reach=self.reach)
        mask.known_extents = extents
        return mask

    def extents(self) -> Extents:
        """The extents of the keys that any query sees, for each row of the batch (B or 1). Read once for each mask."""
        if self.known_extents is None:
            self.known_extents = self._structure()[-1]
        return self.known_extents

    def row_ends(self, batch: int) -> tuple[tuple[int, ...] | None, torch.Tensor | None]:
        """Each row's last visible index + 1, and `keep` if a row hides an earlier key.

        (None, `keep`) if this is no mask of keys.
        """
        if self.keep is None or self.keep.shape[1] != 1 or self.keep.shape[2] != 1:
            return None, self.keep
        extents = self.extents()
        rows = range(batch)
        ends = tuple(extents.of(row)[1] for row in rows)
        return ends, self.keep if any(extents.hides_one(row) for row in rows) else None

    def device_read(self) -> DeviceRead:
        """The read that `simplified` and `extents` need."""
        # One tensor may back masks of several shapes. Each shape has its own cached answer.
        return DeviceRead(self.source, ("mask", tuple(self.keep.shape)), self._read_structure)  # type: ignore[arg-type, union-attr]

    def _structure(self) -> tuple[bool, bool, bool, Extents]:
        """(all queries see the same keys, keys and triangle suffice, the last query sees all keys, extents)."""
        ((same_keys, triangle, complete, *places),) = read_now(self.device_read())
        rows = [tuple(int(place) for place in places[row::3]) for row in range(3)]
        return bool(same_keys), bool(triangle), bool(complete), Extents(*rows)

    def _read_structure(self) -> torch.Tensor:
        keep = self.keep
        assert keep is not None
        query_length, key_length = keep.shape[-2:]
        keys = keep[..., -1:, :]
        seen = keys[:, :, 0]
        if query_length == 1 or keep.stride(-2) == 0:
            same_keys = triangle = torch.ones(1, dtype=torch.bool, device=keep.device)
        else:
            same_keys = triangle = torch.all(keep == keys).view(1)
            if not (
                on_processor(keep.device) and bool(same_keys)
            ):  # reads are cheap on a processor, comparisons are not
                visible = AttentionMask(keys, None, key_length - query_length).visible(
                    query_length, key_length, keep.device
                )
                triangle = torch.eq(keep, visible).all().view(1)  # type: ignore[arg-type]
                seen = keep.any(2)
        seen = seen.any(1)  # (B, Lk)
        indices = torch.arange(key_length, device=keep.device)
        last = torch.where(seen, indices + 1, 0).amax(-1)
        first = torch.where(seen, indices, key_length).amin(-1).minimum(last)  # both are 0 without a visible key
        places = torch.stack((first, last, seen.sum(-1)), dim=-1).flatten()  # (B · 3)
        return torch.cat((same_keys.float(), triangle.float(), keys.all().view(1).float(), places.float()))


def _expanded(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A mask with four dimensions and all keys. Sizes are not compared while tracing: the operations check them."""
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if not traced() and (
        mask.dim() > 4 or any(size not in (1, expected) for size, expected in zip(mask.shape, shape, strict=True))
    ):
        raise AttentionInputError(
            f"The attention mask has shape {tuple(mask.shape)}, which does not broadcast to (batch, heads, queries, keys) = "
            f"{tuple(shape)}. In each dimension, pass the same size or 1."
        )
    return mask if mask.shape[-1] != 1 or shape[-1] == 1 else mask.expand(-1, -1, -1, shape[-1])
