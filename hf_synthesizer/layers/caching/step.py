"""One call of a layer whose cache has dropped tokens: each group of heads attends to what it has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...attend import attend
from ...errors import UnsupportedModelError
from ...logits.forms import HeadPartition, Logits
from ...logits.masks import AttentionMask
from ...logits.positions import Positions, rows_in
from ...logits.reach import Windowed
from ...logits.relative import numbered_tokens
from .kept import Far, Kept, KeptLayer, NewTokens
from .kinds import self_attention_cache
from .needs import Need

Fill = Callable[[Logits, int], Logits]
"""Puts dot products in the place of placeholders in the logits of a need."""


def layer_that_drops(past_key_values: Any, layer_idx: Any) -> KeptLayer | None:
    """The part of a cache for one layer, if it has dropped tokens; else None."""
    layers = getattr(self_attention_cache(past_key_values), "layers", None)
    if not isinstance(layers, list) or not isinstance(layer_idx, int) or layer_idx >= len(layers):
        return None
    layer = layers[layer_idx]
    return layer if isinstance(layer, KeptLayer) and layer.holds_parts else None


class KeptStep:
    """The tokens that a layer's cache keeps, the new ones included, in one call of the layer.

    Attributes:
        layer: of the cache.
        needs: of the groups of heads.
        kept: what each need sees.
        before: how many tokens the layer has seen before.
        length: the number of new tokens.
        total: the number of all tokens.
    """

    def __init__(self, past_key_values: Any, layer_idx: int, layer: KeptLayer, needs: Sequence[Need], new: NewTokens):
        """Add the new tokens to the cache.

        Raises:
            UnsupportedModelError: if the cache was made by a layer whose heads need other tokens.
        """
        self.layer = layer
        self.needs = list(needs)
        self._require_same_needs()
        self.before, self.length = layer.seen, new.value.shape[2]
        self.total = self.before + self.length
        self.kept: Kept = self_attention_cache(past_key_values).update(new.value, new, layer_idx)[0]
        self.device = self.kept.device

    def _require_same_needs(self) -> None:
        kept_needs, asked = self.layer.needs, tuple(need.without_synthesizer() for need in self.needs)
        if kept_needs == asked:
            return
        without = [[Need(need.heads, None, 0)] for need in (*kept_needs, *asked)]
        same = len(kept_needs) == len(asked) and without[: len(kept_needs)] == without[len(kept_needs) :]
        if (
            same
            and all(far is None for far in self.layer.far)
            and all(
                (one.near, one.sinks) == (other.near, other.sinks) or (start == 0 and (one.merges or other.merges))
                for one, other, start in zip(kept_needs, asked, self.layer.starts, strict=True)
            )
        ):
            self.layer.needs = asked  # weights are wanted now, or no longer: nothing was merged yet
            return
        raise UnsupportedModelError(
            "The cache has dropped tokens that this layer needs: it was filled by a layer with other windows, or, where logits "
            "by distance have no window, without output_attentions or the backend 'eager', which need every token. Give the model a "
            "new DynamicCache, or none, and generate() makes one."
        )

    def attend(
        self,
        hidden_states: torch.Tensor,
        positions: Positions,
        mask: AttentionMask,
        dropout: float,
        need_weights: bool,
        heads: int,
        fill: Fill | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, H, Lq, d_v), and weights (B, H, Lq, Lk) or None. `positions` and `mask` are those of all tokens."""
        batch = hidden_states.shape[0]
        mask = mask.expanded_to((batch, heads, self.length, self.total))
        one = self.length == 1 and self.kept.unpadded and mask.keep is None and not positions.per_row
        kept = self.kept = self.kept.for_one_query() if one else self.kept
        tokens: torch.Tensor | None = None
        outputs, weights = [], []
        for number, need in enumerate(self.needs):
            value, states = kept.values(number, heads), kept.states(number)
            columns, far = kept.columns(number), kept.far[number]
            if need.synthesizer.max_length:
                positions.require(need.synthesizer.max_length)
            key_positions, seen = positions, of_heads(mask, need.heads)
            if columns is not None:
                if one:
                    key_positions = after_columns(columns[0], self.total)
                    seen = AttentionMask(bias=None if mask.bias is None else seen.bias[..., columns[0][0]])  # type: ignore[index]
                else:
                    if tokens is None:
                        tokens = numbered_tokens(positions, mask, self.device)
                    key_positions = at_columns(positions, columns[0], tokens)
                    seen = mask_of_columns(seen, columns, self.length)
                key_positions.required = need.synthesizer.max_length
                if far is not None:
                    value, states, key_positions, seen = with_far(
                        far, value, states, key_positions, seen, need.near or 1
                    )
            logits = need.synthesizer(hidden_states, states, key_positions)
            if one and columns is not None and isinstance(logits, Windowed):
                logits = logits.logits  # nothing else is left
            if fill is not None:
                logits = fill(logits, number)
            output, own_weights = attend(logits, value, seen, dropout=dropout, need_weights=need_weights)
            outputs.append(output)
            if own_weights is not None and columns is not None:
                whole = own_weights.new_zeros(*own_weights.shape[:3], self.total)
                index = columns[0][:, None, None].expand_as(own_weights)
                own_weights = whole.scatter_add(-1, index, own_weights)  # hidden columns have weight 0
            weights.append(own_weights)
        if len(outputs) == 1:
            return outputs[0], weights[0]
        partition = HeadPartition([need.heads for need in self.needs])
        joined = partition.join(weights) if need_weights else None  # type: ignore[arg-type]
        return partition.join(outputs), joined


def after_columns(index: torch.Tensor, total: int) -> Positions:
    """The positions of a query that is the last of `total` tokens, and of the keys at the indices (1, K), without padding."""
    return Positions(1, index.shape[-1], total - 1, index[:, -1:], index, tokens=index)


def at_columns(positions: Positions, index: torch.Tensor, tokens: torch.Tensor) -> Positions:
    """The positions of all queries, and of the keys at the indices (B or 1, K)."""
    query, key = positions.numbers(index.device)
    key, tokens = gathered(key, index), gathered(tokens, index)
    rows = rows_in(query, key)
    return Positions(
        positions.query_length,
        index.shape[-1],
        positions.start,
        query.expand(rows, -1),
        key.expand(rows, -1),
        windowed=positions.windowed,
        tokens=tokens,
    )


def gathered(numbers: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The numbers (B or 1, L) at the indices (B or 1, K)."""
    rows = rows_in(numbers, index)
    return numbers.expand(rows, -1).gather(-1, index.expand(rows, -1))


def of_heads(mask: AttentionMask, heads: Sequence[int]) -> AttentionMask:
    """The mask of these heads."""
    tensors = [
        tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, list(heads)]
        for tensor in (mask.keep, mask.bias)
    ]
    if tensors[0] is mask.keep and tensors[1] is mask.bias:
        return mask
    return AttentionMask(tensors[0], tensors[1], mask.causal_offset)


def mask_of_columns(
    mask: AttentionMask, columns: tuple[torch.Tensor, torch.Tensor | None], length: int
) -> AttentionMask:
    """The mask of the keys at the indices (B or 1, K), but for those that are hidden. Its causal part becomes a tensor."""
    index, hidden = columns

    def of_keys(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if index.shape[0] == 1:
            return tensor.index_select(-1, index[0])
        rows = rows_in(tensor, index)
        place = index[:, None, None].expand(rows, tensor.shape[1], tensor.shape[2], -1)
        return tensor.expand(rows, -1, -1, -1).gather(-1, place)

    keep = of_keys(mask.keep)
    if mask.causal_offset is not None:
        query = torch.arange(length, device=index.device)[:, None] + mask.causal_offset
        past = index[:, None, None] <= query
        keep = past if keep is None else keep & past
    if hidden is not None:
        shown = ~hidden[:, None, None]
        keep = shown if keep is None else keep & shown
    return AttentionMask(keep, of_keys(mask.bias))


def with_far(
    far: Far, value: torch.Tensor, states: torch.Tensor | None, positions: Positions, mask: AttentionMask, near: int
) -> tuple[torch.Tensor, torch.Tensor | None, Positions, AttentionMask]:
    """The same with the pseudo-token of merged tokens in front.

    Its key states are 0, it stands at least `near` places behind each query, and its logit gets `far.log` in addition.
    """
    device, heads = value.device, far.log.shape[1]
    value = torch.cat([far.value.to(value).unsqueeze(2), value], dim=2)
    if states is not None:
        states = torch.cat([torch.zeros_like(states[:, :, :1]), states], dim=2)
    query, key = positions.numbers(device)
    place = query.amin(-1, keepdim=True) - near
    assert positions.tokens is not None
    placed = Positions(
        positions.query_length,
        positions.key_length + 1,
        positions.start,
        query,
        torch.cat([place, key], dim=-1),
        windowed=positions.windowed,
        tokens=torch.cat([torch.full_like(positions.tokens[:, :1], -1), positions.tokens], dim=-1),
    )
    placed.required = positions.required
    merged = far.log.to(device)[:, :, None, None]  # (B, h, 1, 1)
    others = positions.key_length
    if mask.bias is None and mask.keep is None:
        bias = torch.cat([merged, merged.new_zeros(1, 1, 1, 1).expand(*merged.shape[:3], others)], dim=-1)
        return value, states, placed, AttentionMask(None, bias)
    exists = merged > float("-inf")  # a row may have had padding alone
    beside = merged.new_zeros(1, 1, 1, others) if mask.bias is None else mask.bias.to(merged.dtype)
    keep = exists.new_ones(1, 1, 1, others) if mask.keep is None else mask.keep

    def joined(front: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        rows = rows_in(front, rest)
        return torch.cat([front.expand(rows, -1, rest.shape[2], -1), rest.expand(rows, heads, -1, -1)], dim=-1)

    return value, states, placed, AttentionMask(joined(exists, keep), joined(merged.masked_fill(~exists, 0.0), beside))
