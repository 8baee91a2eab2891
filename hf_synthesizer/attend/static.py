"""The static route: each head has one table of weights for the whole batch, and needs one matrix product.

If the logits R do not depend on the input, softmax(R) does not either. Key padding m and a key's salience s_j differ between
rows of the batch, but they only scale columns. With e_j = m_j · exp(s_j − max s),

    out = (softmax(R) @ (e ∘ V)) / (softmax(R) @ e),

so one product computes both, over the values with e as an additional column. No tensor has B·H·L·L numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from ..device.autocast import without_autocast
from ..device.matmul import product
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from . import native
from .strip_inputs import size_of_a_strip
from .table_spread import known_spread
from .terms import StaticTerm, Terms, static_terms

# exp(−60) / L is far above the smallest normal float32: no denominator can underflow.
MAX_RANGE = 60.0
FEW_TOKENS = 1024  # tokens of a batch; up to this number, native kernels train bfloat16 tables faster
ROWS = 512  # rows of a tile of weights, which must fit the cache


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Static forms with any number of key biases, under a mask of keys and a triangle, without dropout.

    Dropout is excluded, because it draws different weights for each row of the batch. Logits with a range above `MAX_RANGE` need
    a route that subtracts each row's maximum. On devices other than processors, so do key biases and tables whose range is not
    known yet. Training takes the native kernels where they are as fast.
    """
    if dropout or isinstance(mask.causal_offset, torch.Tensor):
        return False
    if terms.low_rank or terms.tiled or terms.explicit or terms.placed or not (terms.static or terms.weights):
        return False
    if mask.keep is not None and mask.keep.shape[-2] != 1:
        return False
    if terms.weights is not None and mask.causal_offset is not None and not terms.weights.causal:
        return False
    if (
        _needs_softmax_gradient(terms, value)
        and not _kernel_gradient_is_costly(terms, value)
        and native.serves(terms, value, mask, dropout)
    ):
        return False
    unmasked = mask.keep is None and terms.key_bias is None
    if value.dtype == torch.float16 and (not unmasked or on_processor(value.device)):
        return False
    if unmasked:
        return terms.weights is None or terms.weights.complete or value.dtype != torch.float16
    if traced() or not on_processor(value.device):
        return not traced() and _known_logit_range(terms, mask) <= MAX_RANGE
    return logit_range(terms, mask) <= MAX_RANGE


def _needs_softmax_gradient(terms: Terms, value: torch.Tensor) -> bool:
    """Whether a gradient flows through the softmax or its values; False for weights that are known."""
    if not torch.is_grad_enabled() or terms.weights is not None:
        return False
    tensors = [value, terms.key_bias, *(tensor for term in terms.static for tensor in term)]
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _kernel_gradient_is_costly(terms: Terms, value: torch.Tensor) -> bool:
    """Whether the native kernels would sum a table's gradient in float32 although the table has a smaller dtype."""
    tables = [term.table for term in terms.static if term.keys is None and term.table.requires_grad]
    few = value.shape[0] == 1 or value.shape[0] * value.shape[-2] <= FEW_TOKENS  # one row needs no sum
    return not few and any(table.dtype != torch.float32 for table in tables)


def static_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v)."""
    batch, heads, key_length, width = value.shape
    causal_offset = cast(int | None, mask.causal_offset)
    factor = column_factor(terms, mask, value)  # (B or 1, H or 1, Lk, 1), or None
    if native.serves_shared_weights(terms, value) and not (
        torch.is_grad_enabled() and factor is not None and factor.requires_grad
    ):
        return native.shared_weights_attention(terms, value, causal_offset, factor)
    if factor is None and terms.weights is not None and not terms.weights.complete:
        factor = value.new_ones(1, 1, key_length, 1)
    columns = (
        value if factor is None else torch.cat((value * factor, factor.expand(batch, heads, -1, -1)), dim=-1)
    )  # (B, H, Lk, d_v + 1)
    columns = columns.permute(1, 2, 0, 3).reshape(heads, key_length, -1)  # (H, Lk, B·(d_v + 1))
    tensors = [tensor for term in terms.static for tensor in term]
    if terms.weights is not None:
        products = product_with_weights(terms.weights.weights, columns)
    elif traced():
        products = all_weights(terms.static, causal_offset, key_length).to(columns.dtype) @ columns
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (columns, *tensors)):
        products = SoftmaxProduct.apply(columns, causal_offset, *tensors)
    else:
        products = softmax_product(columns, causal_offset, terms.static)
    summed = products.view(heads, -1, batch, width + (factor is not None)).permute(2, 0, 1, 3)  # (B, H, Lq, …)
    if factor is None:
        return summed
    # Without a visible key both are 0, and so is the output.
    return summed[..., :-1] / summed[..., -1:].clamp(min=torch.finfo(value.dtype).tiny)


def column_factor(terms: Terms, mask: AttentionMask, value: torch.Tensor) -> torch.Tensor | None:
    """e = m · exp(s − max s) over the visible keys."""
    keep = None if mask.keep is None else mask.keep.transpose(-1, -2)  # (B or 1, H or 1, Lk, 1)
    if terms.key_bias is None:
        return None if keep is None else keep.to(value.dtype)
    bias = terms.key_bias.transpose(-1, -2)
    bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    if keep is not None:
        bias = bias.masked_fill(~keep, torch.finfo(bias.dtype).min)
    factor = (bias - bias.detach().amax(-2, keepdim=True)).exp()
    if keep is not None:
        factor = factor.masked_fill(~keep, 0.0)
    return factor.to(value.dtype)


def logit_range(terms: Terms, mask: AttentionMask) -> float:
    """An upper bound of max − min over the logits of a row."""
    total = 0.0 if terms.weights is None else terms.weights.spread
    total += sum(term.spread() for term in terms.static) + sum(term.spread() for term in terms.relative)
    if terms.key_bias is not None:
        bias = terms.key_bias.detach()
        if mask.keep is not None:
            bias = bias.expand(torch.broadcast_shapes(bias.shape, mask.keep.shape))
            bias = bias[mask.keep.expand_as(bias)] if bool(mask.keep.any()) else bias[..., :0]
        if bias.numel():
            low, high = torch.aminmax(bias)
            total += float(high - low)
    return total


def _known_logit_range(terms: Terms, mask: AttentionMask) -> float:
    """`logit_range` without reading the device; infinite if unknown."""
    if terms.key_bias is not None or mask.bias is not None:
        return float("inf")
    total = 0.0 if terms.weights is None else terms.weights.spread
    return total + sum(known_spread(term) for term in terms.static)


def softmax_product(columns: torch.Tensor, causal_offset: int | None, static: list[StaticTerm]) -> torch.Tensor:
    """`softmax(Σ w·R) @ columns` for each head, (H, Lk, c) → (H, Lq, c), one tile of rows at a time."""
    heads, key_length, width = columns.shape
    query_length = static[0][1].shape[-2]
    output = columns.new_empty(heads, query_length, width)
    for head, start, stop, seen in weight_tiles(columns, query_length, causal_offset):
        weights = tile_weights(static, head, start, stop, seen, causal_offset, columns.dtype)
        output[head, start:stop] = product(weights, columns[head, :seen])
        del weights  # frees the tile before the next one
    return output


def product_with_weights(
    weights: torch.Tensor | tuple[torch.Tensor, torch.Tensor], columns: torch.Tensor
) -> torch.Tensor:
    """`weights @ columns` for each head, with weights (H, Lq, Lk) or their two factors."""
    if isinstance(weights, tuple):
        return product_with_weights(weights[0], product_with_weights(weights[1], columns))
    if torch.is_grad_enabled() and columns.requires_grad or traced():
        return weights.to(columns.dtype) @ columns
    return torch.stack([product(w.to(columns.dtype), c) for w, c in zip(weights, columns, strict=True)])


def all_weights(static: list[StaticTerm], causal_offset: int | None, key_length: int) -> torch.Tensor:
    """All weights at once, (H, Lq, Lk), for compilers, which optimise one large operation better than tiles."""
    total = sum((term.materialize() for term in static[1:]), start=static[0].materialize())
    if causal_offset is not None:
        rows = torch.arange(total.shape[-2], device=total.device)[:, None] + causal_offset
        total = total.masked_fill(torch.arange(key_length, device=total.device) > rows, float("-inf"))
    return torch.softmax(total, -1)


def weight_tiles(
    columns: torch.Tensor, query_length: int, causal_offset: int | None
) -> Iterator[tuple[slice, int, int, int]]:
    """Tiles of weights: (heads, first row, last row + 1, number of keys that the rows see).

    On a processor a tile has one head, to fit the cache. On other devices it has as many heads as a strip.
    """
    heads, key_length, _ = columns.shape
    heads_together, rows = 1, ROWS
    if not on_processor(columns.device):
        heads_together, rows = size_of_a_strip(1, heads, query_length, key_length)
    for head in range(0, heads, heads_together):
        for start in range(0, query_length, rows):
            stop = min(start + rows, query_length)
            seen = key_length if causal_offset is None else max(1, min(key_length, stop + causal_offset))
            yield slice(head, min(head + heads_together, heads)), start, stop, seen


def tile_weights(
    static: list[StaticTerm],
    heads: slice,
    start: int,
    stop: int,
    seen: int,
    causal_offset: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Softmax over the first `seen` keys for the rows `start … stop`: (g, rows, seen)."""
    total: torch.Tensor | None = None
    for term in static:
        tile = term.tile(heads, slice(start, stop), seen)
        if term.weight is not None:
            tile = tile * term.weight[heads, None, None].to(tile.dtype)
        total = tile if total is None else total + tile
    total = cast(torch.Tensor, total)
    if causal_offset is not None:
        rows = torch.arange(start, stop, device=total.device)[:, None] + causal_offset
        total = total.masked_fill(torch.arange(seen, device=rows.device) > rows, float("-inf"))
    may_overwrite = (
        causal_offset is not None or len(static) > 1 or static[0].weight is not None or static[0].keys is not None
    )
    weights = (torch.softmax(total, -1, out=total) if may_overwrite else torch.softmax(total, -1)).to(dtype)
    return weights.expand(heads.stop - heads.start, -1, -1)  # if all heads share one table


class SoftmaxProduct(torch.autograd.Function):
    """`softmax_product`, with a backward that recomputes the weights tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, columns: torch.Tensor, causal_offset: int | None, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(columns, *tensors)
        ctx.causal_offset = causal_offset
        with without_autocast(columns.device):
            return softmax_product(columns, causal_offset, static_terms(tensors))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        columns, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            from .differentiable import differentiable_gradients

            needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
            input_gradients = differentiable_gradients(
                lambda tensors: _differentiable_product(tensors, ctx.causal_offset),
                ctx.saved_tensors,
                needed,
                gradient,
            )
            return input_gradients[0], None, *input_gradients[1:]
        static = static_terms(tensors)
        gradient = gradient.contiguous()
        needed = ctx.needs_input_grad[2:]
        covers_all_logits = ctx.causal_offset is None
        grads = empty_static_gradients(static, needed, covers_all_logits)
        column_grad = torch.zeros_like(columns)
        for heads, start, stop, end in weight_tiles(columns, gradient.shape[1], ctx.causal_offset):
            weights = tile_weights(static, heads, start, stop, end, ctx.causal_offset, columns.dtype)
            rows = gradient[heads, start:stop]
            column_grad[heads, :end] += product(rows.transpose(-1, -2).contiguous(), weights).transpose(-1, -2)
            if any(needed):
                logit_grad = product(rows, columns[heads, :end].transpose(-1, -2))
                logit_grad = softmax_gradient(logit_grad, weights)
                accumulate_static_gradients(grads, static, logit_grad, heads, slice(start, stop), covers_all_logits)
        return column_grad, None, *grads


def _differentiable_product(tensors: Sequence[torch.Tensor | None], causal_offset: int | None) -> torch.Tensor:
    """`softmax_product` in operations that autograd can differentiate any number of times."""
    columns = cast(torch.Tensor, tensors[0])
    weights = all_weights(static_terms(tensors[1:]), causal_offset, columns.shape[1])
    return weights.to(columns.dtype) @ columns


def softmax_gradient(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of logits, given the gradient of their softmax: `w · (g − Σ g·w)`."""
    dtype = torch.promote_types(weights.dtype, torch.float32)  # a sum in half precision would round
    factor = weights.to(dtype)
    weighted = gradient.to(dtype) * factor
    return weighted.addcmul_(factor, weighted.sum(-1, keepdim=True), value=-1).to(weights.dtype)


def accumulate_static_gradients(
    grads: Sequence[torch.Tensor | None],
    static: list[StaticTerm],
    logit_grad: torch.Tensor,
    heads: slice,
    queries: slice,
    first: bool,
) -> None:
    """Add the gradient (g, rows, keys) of one tile of logits to the gradients of the static terms.

    `first` says that this part of a table's gradient is uninitialised.
    """
    seen = logit_grad.shape[-1]
    for number, term in enumerate(static):
        weight_grad, table_grad, keys_grad = grads[3 * number : 3 * number + 3]
        table_heads = term.table_heads(heads)
        if weight_grad is not None:
            weight_grad[heads] += (logit_grad * term.tile(heads, queries, seen)).sum((-1, -2))
        if table_grad is None and keys_grad is None:
            continue
        factor = None if term.weight is None else term.weight[heads, None, None].to(logit_grad.dtype)
        if len(term.table) > 1 and term.keys is None:
            target = cast(torch.Tensor, table_grad)[table_heads, queries, :seen]
            if first:
                target.copy_(logit_grad) if factor is None else torch.mul(logit_grad, factor, out=target)
            else:
                target.add_(logit_grad) if factor is None else target.addcmul_(logit_grad, factor)
            continue
        scaled = logit_grad if factor is None else logit_grad * factor
        if len(term.table) == 1:
            scaled = scaled.sum(0, keepdim=True)
        if term.keys is None:
            cast(torch.Tensor, table_grad)[table_heads, queries, :seen] += scaled
            continue
        if table_grad is not None:
            table_grad[table_heads, queries] += scaled @ term.keys[table_heads, :seen].to(scaled.dtype)
        if keys_grad is not None:
            keys_grad[table_heads, :seen] += scaled.transpose(-1, -2) @ term.table[table_heads, queries].to(
                scaled.dtype
            )


def empty_static_gradients(
    static: list[StaticTerm], needed: Sequence[bool], covers_all_logits: bool
) -> list[torch.Tensor | None]:
    """A tensor for each gradient that is needed: uninitialised if `accumulate_static_gradients` overwrites it, else zeros."""
    grads: list[torch.Tensor | None] = []
    for number, tensor in enumerate(tensor for term in static for tensor in term):
        term = static[number // 3]
        written = covers_all_logits and tensor is term.table and len(term.table) > 1 and term.keys is None
        make = torch.empty_like if written else torch.zeros_like
        grads.append(make(tensor) if needed[number] and tensor is not None else None)
    return grads
