"""The cache of a layer whose heads need the nearest tokens and the first ones: it drops all others, and stops growing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ...errors import UnsupportedModelError
from .needs import Need

ROLLBACK = 64
"""The number of tokens that `crop` can take back at least. Assisted generation takes drafts back."""
SLACK = 64
"""Tokens are dropped when there are so many of them, in one go."""


@dataclass(frozen=True)
class Part:
    """Values, keys or key states of some heads, (B, n, S + T, w): of the S first tokens of a row, then of the T last indices.

    Attributes:
        tensor: of the heads at `places` of the tensor that it is cut from, whose numbers are `heads`.
        owners: numbers of the needs that use it.
        sinks: S, once something is dropped.
        start: the first of the T last indices; with 0 these are all tokens, and no first tokens are apart.
    """

    tensor: torch.Tensor
    places: tuple[int, ...]
    heads: tuple[int, ...]
    owners: tuple[int, ...]
    sinks: int
    start: int = 0

    def cut(self, new: torch.Tensor) -> torch.Tensor:
        """The same heads of a tensor."""
        return new if len(self.places) == new.shape[1] else new[:, list(self.places)]

    def extended(self, new: torch.Tensor) -> Part:
        return replace(self, tensor=torch.cat([self.tensor, self.cut(new)], dim=2))

    def taken(self, start: int, first: torch.Tensor, number: int) -> torch.Tensor:
        """The first `number` tokens of each row, whose indices are `first` (B or 1, …), and the indices from `start` on."""
        stored = self.sinks if self.start else 0
        if start == 0 or (start == self.start and number == stored):
            return self.tensor
        sinks = self.tensor[:, :, :number] if stored else columns_of(self.tensor, first[:, :number])
        return torch.cat([sinks, self.tensor[:, :, stored + start - self.start :]], dim=2)

    def trimmed(self, start: int, first: torch.Tensor) -> Part:
        """Without the tokens before `start`, but with the first ones."""
        return self if start == self.start else replace(self, tensor=self.taken(start, first, self.sinks), start=start)


def columns_of(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The tokens (B, n, K, w) of (B, n, L, w) at the indices (B or 1, K)."""
    if index.shape[0] == 1:
        return tensor.index_select(2, index[0].to(tensor.device))
    index = index.to(tensor.device)[:, None, :, None]
    return tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[-1]))


@dataclass(frozen=True)
class Far:
    """One pseudo-token for the tokens that some heads have merged: `log` Σ e^s (B, h), and their mean `value` (B, h, d_v)."""

    log: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Kept:
    """What a layer's cache keeps, as each need sees it. `total` is the number of all tokens, with those that it has dropped."""

    needs: tuple[Need, ...]
    starts: tuple[int, ...]
    value_parts: list[Part]
    key_parts: list[Part]
    state_parts: list[Part]
    first: torch.Tensor | None
    first_hidden: torch.Tensor | None
    unpadded: bool
    far: list[Far | None]
    total: int
    device: torch.device

    def for_one_query(self) -> Kept:
        """The same without the tokens that only `crop` could need: one query at the end sees all that is left."""
        starts = [
            self.total - (need.near or 0) if start and not need.merges else start
            for start, need in zip(self.starts, self.needs, strict=True)
        ]
        return replace(self, starts=tuple(starts))

    def values(self, number: int, heads: int) -> torch.Tensor:
        """The values (B, h, K, d_v) of each head of a need, for `heads` heads of the layer in all."""
        groups = 1 + max(head for part in self.value_parts for head in part.heads)
        return self._of_heads(
            self.value_parts, number, [head // (heads // groups) for head in self.needs[number].heads]
        )

    def keys(self, number: int, wanted: Sequence[int]) -> torch.Tensor:
        """The keys (B, len(wanted), K, d_h) of these heads of keys, as a need sees them."""
        return self._of_heads(self.key_parts, number, wanted)

    def states(self, number: int) -> torch.Tensor | None:
        """The key states (B, h, K, w) of a need."""
        for part in self.state_parts:
            if number in part.owners:
                states = self._taken(part, number)
                heads = len(self.needs[number].heads)
                if states.shape[1] != heads:
                    states = states[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)
                return states
        return None

    def _taken(self, part: Part, number: int) -> torch.Tensor:
        start = self.starts[number]
        if start == 0:
            return part.tensor
        assert self.first is not None
        return part.taken(start, self.first, self.needs[number].sinks)

    def _of_heads(self, parts: list[Part], number: int, wanted: Sequence[int]) -> torch.Tensor:
        used = [part for part in parts if number in part.owners]
        tensors = [self._taken(part, number) for part in used]
        kept = [head for part in used for head in part.heads]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        if list(wanted) == kept:
            return tensor
        times = len(wanted) // len(kept)
        if list(wanted) == [head for head in kept for _ in range(times)]:  # much faster than an index
            return tensor.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
        return tensor[:, [kept.index(head) for head in wanted]]

    def columns(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The indices (B or 1, K) of the tokens of a need, and which of them to hide; None if it has all tokens."""
        start, sinks = self.starts[number], self.needs[number].sinks
        if start == 0:
            return None
        assert self.first is not None
        first = self.first[:, :sinks]
        last = torch.arange(start, self.total, device=self.device).expand(first.shape[0], -1)
        hidden = None
        if self.first_hidden is not None:
            hidden = torch.cat([self.first_hidden[:, :sinks], torch.zeros_like(last, dtype=torch.bool)], dim=-1)
        return torch.cat([first, last], dim=-1), hidden


class KeptLayer(DynamicLayer):
    """A `DynamicLayer` that drops what its heads no longer need.

    It is one until `hold` gives it parts: then keys and values are in `value_parts`, `key_parts` and `state_parts`. It counts all
    tokens that it has seen, so that masks and positions are those of the whole sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.needs: tuple[Need, ...] = ()
        self.value_parts: list[Part] = []
        self.key_parts: list[Part] = []
        self.state_parts: list[Part] = []
        self.starts: list[int] = []
        self.far: list[Far | None] = []
        self.first: torch.Tensor | None = None
        """The indices (B or 1, S) of the first tokens of each row."""
        self.first_hidden: torch.Tensor | None = None
        """True where a row has no such token, (B or 1, S); None if all rows have all."""
        self.unpadded = False
        """Whether the first tokens of all rows are at the indices 0 … S − 1."""
        self.seen = 0

    def hold(
        self,
        needs: Sequence[Need],
        seen: int,
        values: list[Part],
        keys: list[Part],
        states: list[Part],
    ) -> None:
        """Hold these parts, of `seen` tokens, from now on."""
        self.needs = tuple(need.without_synthesizer() for need in needs)
        self.value_parts, self.key_parts, self.state_parts, self.seen = values, keys, states, seen
        self.starts, self.far = [0] * len(needs), [None] * len(needs)
        self.dtype, self.device = values[0].tensor.dtype, values[0].tensor.device
        self.keys = self.values = None
        self.is_initialized = True

    @property
    def holds_parts(self) -> bool:
        return bool(self.needs)

    @property
    def nbytes(self) -> int:
        """The bytes of all that is kept."""
        tensors = [part.tensor for part in self.parts()]
        tensors += [tensor for far in self.far if far is not None for tensor in (far.log, far.value)]
        return sum(tensor.nbytes for tensor in tensors)

    def parts(self) -> Iterator[Part]:
        for parts in (self.value_parts, self.key_parts, self.state_parts):
            yield from parts

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As of a `DynamicLayer`. Once this layer holds parts, `NewTokens` takes the place of the values."""
        if not self.holds_parts:
            return super().update(key_states, value_states, *args, **kwargs)
        if not isinstance(value_states, NewTokens):
            raise UnsupportedModelError(
                "The cache holds a part of its tokens, as a synthesized layer with a window needs them, and another layer asks for "
                "all of them. Give this model a new DynamicCache, or none, and generate() makes one."
            )
        new = value_states
        self.value_parts = [part.extended(new.value) for part in self.value_parts]
        if new.key is not None:
            self.key_parts = [part.extended(new.key) for part in self.key_parts]
        self.state_parts = [part.extended(new.states[part.owners[0]]) for part in self.state_parts]  # type: ignore[arg-type]
        self.seen += new.value.shape[2]
        return self.view(), None

    def trim(self, starts: Sequence[int], first: torch.Tensor, hidden: torch.Tensor | None, unpadded: bool) -> None:
        """Drop the tokens before `starts`, by need, but the first ones of each row."""
        if self.first is None:
            self.first, self.first_hidden, self.unpadded = first, hidden, unpadded
        self.starts = list(starts)

        def trimmed(parts: list[Part]) -> list[Part]:
            return [part.trimmed(min(starts[owner] for owner in part.owners), self.first) for part in parts]  # type: ignore[arg-type]

        self.value_parts, self.key_parts = trimmed(self.value_parts), trimmed(self.key_parts)
        self.state_parts = trimmed(self.state_parts)

    def view(self) -> Kept:
        """What is kept now. Tensors may be offloaded after this."""
        device = self.value_parts[0].tensor.device
        first, hidden = (None if index is None else index.to(device) for index in (self.first, self.first_hidden))
        return Kept(
            self.needs,
            tuple(self.starts),
            self.value_parts,
            self.key_parts,
            self.state_parts,
            first,
            hidden,
            self.unpadded,
            list(self.far),
            self.seen,
            device,
        )

    def get_seq_length(self) -> int:
        return self.seen if self.holds_parts else super().get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: −n of them, or all beyond n.

        Raises:
            UnsupportedModelError: if tokens are needed again that this layer has dropped.
        """
        if not self.holds_parts:
            super().crop(tokens_to_remove)
            return
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if removed == 0:
            return
        left = self.seen - removed
        kept = [(start, need.near) for start, need in zip(self.starts, self.needs, strict=True) if start]
        if any(near is not None and left - near + 1 < start for start, near in kept):
            most = self.seen - max(start + (near or 1) - 1 for start, near in kept)
            raise UnsupportedModelError(
                f"The cache was asked to take back {removed} of {self.seen} tokens, but it has dropped tokens that the query "
                f"after these needs: heads with a window keep their last tokens, and {most} can be taken back. Draft at most "
                f"{ROLLBACK} tokens at a time (num_assistant_tokens), or call reset() on the cache and read the sequence again."
            )

        def shorter(parts: list[Part]) -> list[Part]:
            return [replace(part, tensor=part.tensor[:, :, :-removed]) for part in parts]

        self.value_parts, self.key_parts = shorter(self.value_parts), shorter(self.key_parts)
        self.state_parts, self.seen = shorter(self.state_parts), left

    def reset(self) -> None:
        super().reset()
        self.clear()

    def offload(self) -> None:
        if self.holds_parts:
            self._change(lambda tensor: tensor.to("cpu", non_blocking=True))
        else:
            super().offload()

    def prefetch(self) -> None:
        if self.holds_parts:
            self._change(lambda tensor: tensor.to(self.device, non_blocking=True))
        else:
            super().prefetch()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.holds_parts:
            self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        else:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.holds_parts:
            self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        else:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.holds_parts:
            self._change_rows(lambda tensor: tensor[indices.to(tensor.device), ...])
        else:
            super().batch_select_indices(indices)

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all tensors of tokens."""
        for name in ("value_parts", "key_parts", "state_parts"):
            setattr(self, name, [replace(part, tensor=change(part.tensor)) for part in getattr(self, name)])
        self.far = [None if far is None else Far(change(far.log), change(far.value)) for far in self.far]

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the rows of the batch. Indices may be the same for all rows."""
        batch = self.value_parts[0].tensor.shape[0]
        self._change(change)
        if self.first is not None and (self.first.shape[0] == batch != 1):
            self.first = change(self.first)
        if self.first_hidden is not None and (self.first_hidden.shape[0] == batch != 1):
            self.first_hidden = change(self.first_hidden)


def bytes_of(layer: Any) -> int:
    """The bytes that a layer of a cache keeps."""
    if isinstance(layer, KeptLayer) and layer.holds_parts:
        return layer.nbytes
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@dataclass(frozen=True)
class NewTokens:
    """What a layer has computed of new tokens: values (B, G, L, d_v), keys (B, G' ≤ G, L, d_h) and each need's key states."""

    value: torch.Tensor
    key: torch.Tensor | None
    states: list[torch.Tensor | None]
