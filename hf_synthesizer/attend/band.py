"""The band route: logits by distance that are the same for each query. Its cost grows with the length.

t are the logits by distance, s_j a key's salience (its sink included) and m_j its mask. With
c_j = m_j · exp(s_j − max s) · (v_j, 1),

    Σ_j c_j · exp(t(j − i)) = Σ_{−b ≤ δ ≤ a} exp(t_δ) · c_{i+δ} + exp(t_−) · P_{i−b−1} + exp(t_+) · S_{i+a+1}

Near keys are a band: the weights of a block of queries are the same for all blocks, so that each head has one small
matrix. Far keys have one weight on each side, so their part is a running sum, P from the front and S from the back.
With a window, the first tokens of a row take the place of the far keys: they are added where they lie outside the band.
The last column of c gives the denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from ..device.matmul import product
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from ..logits.reach import Reach
from . import native
from .static import MAX_RANGE, column_factor, logit_range
from .terms import RelativeTerm, Terms

BLOCK = 64  # queries that share a matrix of weights
CHUNK = 1 << 20  # numbers of a chunk of windows, which must fit the cache


class Band(NamedTuple):
    """The weights of a head's distances."""

    weights: torch.Tensor
    """exp(t − max t), (H, D + 1 or 2·D + 1)."""
    furthest: int
    """D."""
    behind: int
    """b: the band holds the keys from i − b …"""
    ahead: int
    """… to i + a."""

    def columns(self, distance: torch.Tensor) -> torch.Tensor:
        """The column of each distance j − i."""
        return (distance + self.furthest).clamp(0, self.weights.shape[-1] - 1)

    def of(self, distance: torch.Tensor) -> torch.Tensor:
        """The weights of distances: (H, *distance.shape)."""
        return self.weights[:, self.columns(distance)]

    def block(self) -> torch.Tensor:
        """The weights of a block of queries, (H, BLOCK, b + BLOCK + a), for the keys from b before it to a after it."""
        device = self.weights.device
        row = torch.arange(BLOCK, device=device)[:, None]
        distance = torch.arange(self.behind + BLOCK + self.ahead, device=device) - self.behind - row
        outside = (distance < -self.behind) | (distance > self.ahead)
        return self.of(distance).masked_fill(outside, 0.0)


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """One term by distance and any number of key biases, under a mask of keys, a triangle and a window; no dropout.

    Only on processors: elsewhere, to know the range of the logits is to wait for the device.
    """
    if not on_processor(value.device) or dropout or len(terms.relative) != 1:
        return False
    if mask.causal_offset not in (None, terms.relative[0].start):
        return False
    rows = terms.relative[0].rows
    if rows.shape[0] != 1 or rows.shape[2] != 1:
        return False
    if terms.static or terms.low_rank or terms.tiled or terms.explicit or terms.placed or terms.weights is not None:
        return False
    if mask.keep is not None and mask.keep.shape[-2] != 1:
        return False
    if (
        value.dtype == torch.float16
        or traced()
        or (mask.reach is not None and native.serves(terms, value, mask, dropout))
    ):
        return False
    return logit_range(terms, mask) <= MAX_RANGE


def band_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    term = terms.relative[0]
    if mask.reach is None and term.start == 0 and native.serves(terms, value, mask, dropout):
        return _near_by_kernels_far_by_sums(terms, value, mask)
    dtype, (batch, heads, key_length, _), query_length = value.dtype, value.shape, terms.query_length
    start, causal = term.start, mask.causal_offset is not None
    if torch.is_grad_enabled():
        value = value.to(torch.promote_types(value.dtype, torch.float32))  # gradients are sums over many queries
    factor = column_factor(terms, mask, value)
    if factor is None:
        factor = value.new_ones(1, 1, key_length, 1)
    columns = torch.cat((value * factor, factor.expand(batch, heads, -1, -1)), dim=-1)  # (B, H, Lk, d_v + 1)
    band = _band(term.logits(heads), term, mask, key_length)
    sums = _near(band, columns, start, query_length)
    if mask.reach is None:
        sums = sums + _far(band, columns, start, query_length, causal)
    elif mask.reach.sinks:
        sums = sums + _sinks(band, columns, start, query_length, mask.reach, causal)
    return (sums[..., :-1] / sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)).to(dtype)


def _near_by_kernels_far_by_sums(terms: Terms, value: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Without a window: kernels for the key blocks near a block of queries, running sums for the others.

    Both parts are averages of values: a over near keys, f over far ones. n and l are the logarithms of their sums of
    weights. The output is σ · a + (1 − σ) · f with σ = sigmoid(n − l).
    """
    term = terms.relative[0]
    heads, key_length = value.shape[1:3]
    device, query_length = value.device, terms.query_length
    near, near_log = native.near_attention(terms, value, mask, term.form.max_distance + 1)
    query_block = torch.arange(-(-query_length // BLOCK), device=device)
    first, last = native.near_blocks(query_block, term.form.max_distance + 1)
    blocks = -(-key_length // BLOCK)
    first, last = first.clamp(min=0), last.clamp(max=blocks)
    sums, largest = _block_sums(terms, value, mask, blocks)  # (B, H, blocks, d_v + 1)
    logits = term.logits(heads).float()  # (H, columns)
    most = logits[:, [0, -1]].detach().amax(-1)[:, None, None]  # (H, 1, 1)
    # Sums over the blocks 0 … k − 1 are at place k.
    total = functional.pad(sums.cumsum(2), (0, 0, 1, 0))[:, :, first] * (logits[:, :1, None] - most).exp()
    if mask.causal_offset is None:
        behind = functional.pad(sums.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))  # over the blocks from k on
        total = total + behind[:, :, last] * (logits[:, -1:, None] - most).exp()
    tiny = torch.finfo(total.dtype).tiny
    weight = total[..., -1:]
    far = total[..., :-1] / weight.clamp(min=tiny)
    far_log = largest + most + weight.clamp(min=tiny).log()  # (B, H, query blocks, 1)
    none: torch.Tensor | None = None  # (B or 1, Lq): queries without a near key
    if mask.keep is not None:
        seen = functional.pad(mask.keep[:, :, 0].any(1).cumsum(-1), (1, 0))  # (B or 1, Lk + 1)
        row = torch.arange(query_length, device=device)
        row_block = row // BLOCK
        end = row + 1 if mask.causal_offset is not None else (last[row_block] * BLOCK).clamp(max=key_length)
        none = seen[:, end] == seen[:, first[row_block] * BLOCK]
    whole = query_length - query_length % BLOCK  # queries in whole blocks
    parts = [
        _mixed(
            near[:, :, begin:end],
            near_log[:, :, begin:end],
            far[:, :, blocks],
            far_log[:, :, blocks],
            weight[:, :, blocks] == 0,
            None if none is None else none[:, None, begin:end],
        )
        for begin, end, blocks in (
            (0, whole, slice(0, whole // BLOCK)),
            (whole, query_length, slice(whole // BLOCK, None)),
        )
        if begin < end
    ]
    if len(parts) == 1:
        return parts[0].to(value.dtype)
    return torch.cat(parts, dim=2).to(value.dtype) if torch.is_grad_enabled() else near


def _mixed(
    near: torch.Tensor,
    near_log: torch.Tensor,
    far: torch.Tensor,
    far_log: torch.Tensor,
    no_far: torch.Tensor,
    no_near: torch.Tensor | None,
) -> torch.Tensor:
    """σ · near + (1 − σ) · far, (B, H, L, d_v), for L queries in blocks of the same size. Without gradients it overwrites `near`.

    `near` (B, H, L, d_v), `near_log` (B, H, L) and `no_near` (B or 1, 1, L) are of queries; `far` (B, H, blocks, d_v), `far_log` and
    `no_far` (B, H, blocks, 1) of blocks.
    """
    blocks = (far.shape[2], -1)
    share = torch.sigmoid(near_log.unflatten(2, blocks) - far_log).masked_fill(no_far, 1.0)  # (B, H, blocks, rows)
    if no_near is not None:
        share = share.masked_fill(no_near.unflatten(2, blocks), 0.0)
    share = share.unsqueeze(-1)
    of_queries, of_blocks = near.unflatten(2, blocks), far.unsqueeze(3)
    if torch.is_grad_enabled():
        return (share * of_queries + (1 - share) * of_blocks.to(near.dtype)).flatten(2, 3)
    share = share.to(near.dtype)
    of_queries.mul_(share).addcmul_(1 - share, of_blocks.to(near.dtype))
    return near


def _block_sums(
    terms: Terms, value: torch.Tensor, mask: AttentionMask, blocks: int
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Sums over the visible keys of each block, and the largest salience.

    The sums are Σ exp(s_j − max s) · (v_j, 1), (B, H, blocks, d_v + 1). max s is (B or 1, H or 1, 1, 1).
    """
    batch, heads, key_length, _ = value.shape
    value = value.float()
    more = blocks * BLOCK - key_length
    if more:
        value = functional.pad(value, (0, 0, 0, more))
    value = value.unflatten(2, (blocks, BLOCK))
    if terms.key_bias is None and mask.keep is None:
        numbers = value.new_full((blocks,), BLOCK)
        numbers[-1] -= more
        return torch.cat((value.sum(3), numbers[:, None].expand(batch, heads, -1, 1)), dim=-1), 0.0
    largest: torch.Tensor | float = 0.0
    factor = value.new_ones(1, 1, key_length) if mask.keep is None else mask.keep[:, :, 0].to(value.dtype)
    if terms.key_bias is not None:
        bias = terms.key_bias[:, :, 0].float()
        if mask.keep is not None:
            bias = bias.masked_fill(~mask.keep[:, :, 0], torch.finfo(bias.dtype).min)
        largest = bias.detach().amax(-1, keepdim=True)
        factor = factor * (bias - largest).exp()  # (B or 1, H or 1, Lk)
        largest = largest.unsqueeze(-1)
    factor = functional.pad(factor, (0, more)).unflatten(-1, (blocks, BLOCK)).expand(batch, heads, -1, -1)
    # Head by head: a product of all heads would copy the values, whose heads lie side by side.
    sums = torch.stack([factor[:, head].unsqueeze(-2) @ value[:, head] for head in range(heads)], 1).squeeze(-2)
    return torch.cat((sums, factor.sum(-1, keepdim=True)), dim=-1), largest


def _band(logits: torch.Tensor, term: RelativeTerm, mask: AttentionMask, key_length: int) -> Band:
    """The weights of the distances that queries see, from logits (H, D + 1 or 2·D + 1)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    furthest = term.form.max_distance
    ahead = 0 if term.form.causal else furthest
    behind = furthest
    if mask.reach is not None:
        behind = ahead = mask.reach.window - 1
    behind = min(behind, key_length - 1)
    ahead = 0 if mask.causal_offset is not None else min(ahead, key_length - 1)
    return Band(weights, furthest, behind, ahead)


def _near(band: Band, columns: torch.Tensor, start: int, query_length: int) -> torch.Tensor:
    """Σ over the keys from i − b to i + a: (B, H, Lq, d_v + 1)."""
    batch, heads, key_length, width = columns.shape
    blocks = -(-query_length // BLOCK)
    keys = band.behind + BLOCK + band.ahead  # of a block
    first, last = start - band.behind, start + blocks * BLOCK + band.ahead  # of all blocks
    taken = columns[:, :, max(0, first) : max(0, min(last, key_length))]
    before = max(0, -first)
    taken = functional.pad(taken, (0, 0, before, last - first - before - taken.shape[-2]))
    weights = band.block().to(columns.dtype)  # (H, BLOCK, keys)
    windows = taken.unfold(2, keys, BLOCK)  # (B, H, blocks, d_v + 1, keys)
    if (
        torch.is_grad_enabled()
        and (columns.requires_grad or weights.requires_grad)
        or not on_processor(columns.device)
    ):
        sums = torch.einsum("hrk,bhtck->bhtrc", weights, windows)
        return sums.flatten(2, 3)[:, :, :query_length]
    sums = columns.new_empty(batch, heads, blocks, BLOCK, width)
    together = max(1, CHUNK // (keys * width))
    for row in range(batch):
        for head in range(heads):
            for block in range(0, blocks, together):
                window = windows[row, head, block : block + together]  # (t, d_v + 1, keys)
                flat = window.permute(2, 0, 1).reshape(keys, -1)
                products = product(weights[head], flat)  # (BLOCK, t · (d_v + 1))
                sums[row, head, block : block + together] = products.view(BLOCK, -1, width).transpose(0, 1)
    return sums.flatten(2, 3)[:, :, :query_length]


def _far(band: Band, columns: torch.Tensor, start: int, query_length: int, causal: bool) -> torch.Tensor:
    """The sums over the keys before i − b and, without a triangle, after i + a: (B, H, Lq, d_v + 1)."""
    columns = columns.to(torch.promote_types(columns.dtype, torch.float32))
    behind, ahead = band.weights[:, :1, None], band.weights[:, -1:, None]  # (H, 1, 1)
    key_length = columns.shape[-2]
    query = torch.arange(start, start + query_length, device=columns.device)

    def pick(sums: torch.Tensor, index: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        return sums.index_select(2, index.clamp(0, key_length - 1)) * inside[:, None].to(sums.dtype)

    last = query - band.behind - 1
    total = behind * pick(columns.cumsum(2), last, last >= 0)
    if not causal:
        next_key = query + band.ahead + 1
        total = total + ahead * pick(columns.flip(2).cumsum(2).flip(2), next_key, next_key < key_length)
    return total


def _sinks(
    band: Band, columns: torch.Tensor, start: int, query_length: int, reach: Reach, causal: bool
) -> torch.Tensor:
    """The first tokens of each row, for the queries that have them outside their window: (B, H, Lq, d_v + 1)."""
    batch, heads, key_length, width = columns.shape
    numbers = torch.arange(reach.sinks, device=columns.device)
    index = numbers - reach.tokens[:, :1]  # (B or 1, s): where the first tokens are
    present = (index < key_length) & (index >= 0)
    index = index.clamp(0, key_length - 1)
    taken = columns.gather(2, index[:, None, :, None].expand(batch, heads, -1, width))  # (B, H, s, d_v + 1)
    query = torch.arange(start, start + query_length, device=columns.device)
    distance = index[:, None, :] - query[:, None]  # (B or 1, Lq, s)
    outside = (distance < -band.behind) | (distance > band.ahead)
    if causal:
        outside = outside & (distance < 0)
    weights = band.of(distance).transpose(0, 1).masked_fill(~(outside & present[:, None])[:, None], 0.0)
    return weights.to(taken.dtype) @ taken
