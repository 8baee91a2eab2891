"""The static route: each head has one table of weights for the whole batch, and needs one matrix product.

If the logits R do not depend on the input, softmax(R) does not either. Key padding m and a key's salience s_j differ
between rows of the batch, but they only scale columns. With e_j = m_j · exp(s_j − max s),

    out = (softmax(R) @ (e ∘ V)) / (softmax(R) @ e),

so one product computes both, over the values with e as an additional column. No tensor has B·H·L·L numbers.
"""

from __future__ import annotations

from typing import cast

import torch

from ..device.autocast import without_autocast
from ..device.matmul import product
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.forms import Explicit
from ..logits.masks import AttentionMask
from . import native, reference
from .chunked import chunked_attention
from .kernel_terms import KernelTerms
from .table_spread import known_spread, spread, spread_by_distance
from .terms import Terms

# exp(−60) / L is far above the smallest normal float32: no denominator can underflow.
MAX_RANGE = 60.0
FEW_TOKENS = 1024  # tokens of a batch; up to this number, native kernels train bfloat16 tables faster


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Static forms with any number of key biases, under a mask of keys and a triangle, without dropout.

    Dropout is excluded, because it draws different weights for each row of the batch. Logits with a range above
    `MAX_RANGE` need a route that subtracts each row's maximum. On devices other than processors, so do key biases and
    tables whose range is not known yet. Training takes the native kernels where they are as fast.
    """
    if dropout or isinstance(mask.causal_offset, torch.Tensor):
        return False
    if terms.low_rank or terms.tiled or terms.explicit or terms.placed or terms.relative:
        return False
    if not (terms.static or terms.weights) or mask.reach is not None:
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
    if terms.weights is not None:
        products = product_with_weights(terms.weights.weights, columns)
    else:
        products = product_with_logits(terms, columns, causal_offset)
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
    total += sum(spread(term) for term in terms.static) + sum(spread_by_distance(term) for term in terms.relative)
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


def product_with_logits(terms: Terms, columns: torch.Tensor, causal_offset: int | None) -> torch.Tensor:
    """`softmax(Σ w·R) @ columns` for each head, (H, Lk, c) → (H, Lq, c).

    The columns of all rows of the batch are one wide value.
    """
    values, mask = columns.unsqueeze(0), AttentionMask(causal_offset=causal_offset)
    terms = Terms(static=terms.static, query_length=terms.query_length)
    if traced():  # compilers optimise one large operation better than chunks
        logits, _ = KernelTerms.of(terms, values).logits(columns.shape[1])
        return reference.reference_attention(Explicit(logits), values, mask)[0][0]
    with without_autocast(columns.device):
        return chunked_attention(terms, values, mask)[0]


def product_with_weights(
    weights: torch.Tensor | tuple[torch.Tensor, torch.Tensor], columns: torch.Tensor
) -> torch.Tensor:
    """`weights @ columns` for each head, with weights (H, Lq, Lk) or their two factors."""
    if isinstance(weights, tuple):
        return product_with_weights(weights[0], product_with_weights(weights[1], columns))
    if torch.is_grad_enabled() and columns.requires_grad or traced():
        return weights.to(columns.dtype) @ columns
    return torch.stack([product(w.to(columns.dtype), c) for w, c in zip(weights, columns, strict=True)])
