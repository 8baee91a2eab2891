"""Drops tokens from a layer's cache: those that no query will see again, and those that one pseudo-token can stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ...device.tracing import readable, traced
from ...logits.masks import AttentionMask
from ...logits.positions import Positions
from ...logits.relative import numbered_tokens
from ...synthesizers import HeadGroups, Synthesizer
from .kept import ROLLBACK, SLACK, Far, KeptLayer, NewTokens, Part
from .kinds import self_attention_cache
from .needs import Need


def first_kept(need: Need, total: int, length: int, started: int) -> int:
    """The index from which on a need keeps its tokens, after `length` new tokens; `started` if it drops none now."""
    if need.near is None:
        return started
    start = total - (need.near - 1) - max(ROLLBACK, length)
    return start if start - started >= SLACK else started


def can_drop(past_key_values: Any, layer_idx: int) -> bool:
    """Whether the layer's part of a cache is a plain `DynamicLayer`, which `drop_first` can replace."""
    layers = getattr(self_attention_cache(past_key_values), "layers", None)
    if not isinstance(layers, list) or not isinstance(layer_idx, int) or layer_idx >= len(layers) or traced():
        return False
    return type(layers[layer_idx]) in (DynamicLayer, KeptLayer)


def drop_first(
    past_key_values: Any,
    layer_idx: int,
    needs: Sequence[Need],
    heads: int,
    length: int,
    hidden_states: torch.Tensor,
    tokens: NewTokens,
    positions: Positions,
    mask: Callable[[], AttentionMask],
    key_heads: Sequence[tuple[int, ...]] = (),
    all_keys: Sequence[int] = (),
) -> None:
    """Replace a `DynamicLayer` by one that drops tokens, once some can be dropped. `tokens` are all tokens.

    Args:
        past_key_values: the cache.
        layer_idx: the layer's index in it.
        needs: of the groups of heads.
        heads: the number H of heads.
        length: the number of new tokens.
        hidden_states: of the new tokens.
        tokens: values, keys and key states of all tokens.
        positions: of all tokens.
        mask: makes the mask of all tokens.
        key_heads: for each need, the heads of keys (by number of the G groups) that it compares.
        all_keys: the numbers of the keys in `tokens.key`.
    """
    cache = self_attention_cache(past_key_values)
    cache_layer = cache.layers[layer_idx]
    total = tokens.value.shape[2]
    if all(first_kept(need, total, 0 if total == length else length, 0) == 0 for need in needs):
        return
    shared = heads // tokens.value.shape[1]
    value_heads = [tuple(dict.fromkeys(head // shared for head in need.heads)) for need in needs]
    layer = cache_layer if isinstance(cache_layer, KeptLayer) else KeptLayer()
    values = parts_of(tokens.value, range(tokens.value.shape[1]), value_heads, needs)
    keys = [] if tokens.key is None else parts_of(tokens.key, all_keys, key_heads, needs)
    states = [
        Part(tensor, tuple(range(tensor.shape[1])), tuple(range(tensor.shape[1])), (number,), needs[number].sinks)
        for number, tensor in enumerate(tokens.states)
        if tensor is not None
    ]
    draft = KeptLayer()
    draft.hold(needs, total, values, keys, states)
    if not drop(draft, needs, heads, 0 if total == length else length, hidden_states, positions, mask):
        return
    layer.__dict__.update(draft.__dict__)
    cache.layers[layer_idx] = layer
    if getattr(cache, "offloading", False):
        layer.offload()


def parts_of(
    tensor: torch.Tensor, numbers: Sequence[int], heads: Sequence[tuple[int, ...]], needs: Sequence[Need]
) -> list[Part]:
    """One part for each set of needs that use the same heads. `numbers` names the heads of the tensor."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for head in numbers:
        users = tuple(number for number, used in enumerate(heads) if head in used)
        if users:
            owners.setdefault(users, []).append(head)
    parts = []
    for users, shared_heads in owners.items():
        places = [list(numbers).index(head) for head in shared_heads]
        cut = tensor if len(places) == tensor.shape[1] else tensor[:, places]
        parts.append(Part(cut, tuple(places), tuple(shared_heads), users, max(needs[user].sinks for user in users)))
    return parts


def drop(
    layer: KeptLayer,
    needs: Sequence[Need],
    heads: int,
    length: int,
    hidden_states: torch.Tensor,
    positions: Positions,
    whole_mask: Callable[[], AttentionMask],
) -> bool:
    """Drop what the next query does not need. Returns whether anything was dropped.

    Nothing is dropped while a row's first tokens are not all seen, or if the mask or the positions cannot be read.
    """
    starts = [first_kept(need, layer.seen, length, start) for need, start in zip(needs, layer.starts, strict=True)]
    if starts == layer.starts:
        return False
    device, mask = layer.device, whole_mask()
    if device.type == "meta":  # only sizes count there
        positions, mask = Positions(length, layer.seen, layer.seen - length), AttentionMask()
    elif not all(readable(tensor) for tensor in (positions.query, mask.keep) if tensor is not None):
        return False
    tokens, visible = numbered_tokens(positions, mask, device), None
    if mask.keep is not None:
        visible = mask.keep.any(2).any(1)
    sinks = max(need.sinks for need in needs)
    simple = visible is None and not positions.per_row
    for number, need in enumerate(needs):
        if starts[number] == layer.starts[number]:
            continue
        start = starts[number]
        if not simple:
            start = min(start, _first_near(positions, visible, need, length, device))
        passed = start >= sinks if simple else start > 0 and bool((tokens[:, start] >= sinks).all())
        if need.merges and mask.bias is not None and bool(mask.bias.any()):
            passed = False
        starts[number] = start if passed and start - layer.starts[number] >= SLACK else layer.starts[number]
    if starts == layer.starts:
        return False
    if layer.first is not None:
        first, hidden = layer.first, layer.first_hidden
    elif simple:
        first, hidden = torch.arange(sinks, device=device).unsqueeze(0), None
    else:
        first, hidden = _first_tokens(tokens, visible, sinks)
    first = first.to(device)
    for number, need in enumerate(needs):
        if need.merges and starts[number] > layer.starts[number]:
            merge(layer, needs, number, heads, starts[number], first, hidden, visible, hidden_states)
    layer.trim(starts, first, hidden, simple)
    return True


def _first_near(
    positions: Positions, visible: torch.Tensor | None, need: Need, length: int, device: torch.device
) -> int:
    """The first index that any row's next query, or one after `crop`, can see as near."""
    query, key = positions.numbers(device)
    nearest = query[:, -1:] + 1 - max(ROLLBACK, length)
    beyond = nearest - key >= (need.near or 1)
    if visible is not None:
        beyond = beyond | ~visible
    return int(beyond.all(0).long().cumprod(0).sum())


def _first_tokens(
    tokens: torch.Tensor, visible: torch.Tensor | None, sinks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The indices (B or 1, sinks) of the first tokens of each row, and where a row has none; None if all rows have all."""
    candidates = (tokens >= 0) & (tokens < sinks)
    if visible is not None:
        candidates = candidates & visible
    length = candidates.shape[-1]
    order = torch.where(candidates, torch.arange(length, device=tokens.device), length)
    first = order.sort(-1).values[:, :sinks]
    hidden = first == length
    return first.masked_fill(hidden, 0), hidden if bool(hidden.any()) else None


@torch.no_grad()
def merge(
    layer: KeptLayer,
    needs: Sequence[Need],
    number: int,
    heads: int,
    start: int,
    first: torch.Tensor,
    hidden: torch.Tensor | None,
    visible: torch.Tensor | None,
    hidden_states: torch.Tensor,
) -> None:
    """Merge the tokens of a need before `start` into its pseudo-token: Σ e^s · v / Σ e^s and log Σ e^s.

    s is what a key's logit has beside the logit of its distance: the difference from a key whose states are 0.
    """
    kept, begun = layer.view(), layer.starts[number]
    before = needs[number].sinks if begun else 0
    places = slice(before, before + start - begun)
    value = kept.values(number, heads)[:, :, places].float()  # (B, h, E, d_v)
    states = kept.states(number)
    worth = value.new_zeros(*value.shape[:3])
    if states is not None:
        states = states[:, :, places]
        states = torch.cat([states, torch.zeros_like(states[:, :, :1])], dim=2)
        count = states.shape[2]
        place = torch.full((1, count), -(needs[number].near or 1), device=value.device)
        far = Positions(1, count, 0, torch.zeros_like(place[:, :1]), place, tokens=torch.full_like(place, -1))
        far.required = 0
        logits = needs[number].synthesizer(hidden_states[:, -1:], states, far).materialize().float()
        worth = (logits[:, :, 0, :-1] - logits[:, :, 0, -1:]).expand_as(worth)
    index, first_tokens = torch.arange(begun, start, device=value.device), first[:, : needs[number].sinks]
    sink = index[:, None] == first_tokens[:, None]  # (B or 1, E, S)
    if hidden is not None:
        sink = sink & ~hidden[:, None, : needs[number].sinks]
    worth = worth.masked_fill(sink.any(-1)[:, None], float("-inf"))
    if visible is not None:
        worth = worth.masked_fill(~visible[:, None, begun:start], float("-inf"))
    log = worth.logsumexp(-1)  # (B, h)
    known = layer.far[number]
    total = log if known is None else torch.logaddexp(log, known.log.to(log.device))
    scale = total.masked_fill(total == float("-inf"), 0.0)
    mean = ((worth - scale.unsqueeze(-1)).exp().unsqueeze(-2) @ value).squeeze(-2)
    if known is not None:
        mean = mean + (known.log.to(log.device) - scale).exp().unsqueeze(-1) * known.value.to(log.device)
    layer.far[number] = Far(total, mean)


def split_states(synthesizer: Synthesizer, key_states: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The key states of each need. Those of groups of heads are (B, 1, L, H_g · w_g)."""
    if not isinstance(synthesizer, HeadGroups):
        return [key_states]
    split: list[torch.Tensor | None] = []
    start = 0
    for _, heads, group in synthesizer.members():
        width = len(heads) * group.key_width
        split.append(key_states[..., start : start + width] if width and key_states is not None else None)
        start += width
    return split
