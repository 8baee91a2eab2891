"""The route through `scaled_dot_product_attention`: low-rank terms are queries and keys, the others its bias."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch.nn import functional

from ..device.matmul import default_library_is_fast
from ..device.processor import on_processor
from ..device.tracing import traced
from ..logits.masks import AttentionMask
from ..logits.positions import exporting
from ..upstream.torch_names import has_fused_attention
from .kernel_terms import KernelTerms, joined_factors
from .terms import Terms

FEWEST_KEYS = 256  # with fewer keys, one call of the kernel is cheaper than the many calls of the chunked route


def serves(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Logits with a low-rank term, if the operator is the fastest route.

    In traced graphs it always is. On devices other than processors, it is if PyTorch has a fused kernel for these
    logits. Without a fused kernel, the operator computes all logits at once.
    """
    if not terms.low_rank:
        return False
    if traced():
        return True
    if on_processor(value.device):
        return not chunks_are_faster(terms, value, mask, dropout)
    return _has_fused_kernel(terms, value, mask, dropout)


def chunks_are_faster(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Whether a processor computes low-rank logits faster in chunks than with the operator's kernel.

    The kernel is faster for short sequences, and for any length if PyTorch's own matrix library runs at full speed.
    """
    if isinstance(mask.causal_offset, torch.Tensor) or (mask.causal_offset is not None and mask.causal_offset < 0):
        return False
    if dropout or terms.tiled or terms.explicit:
        return True
    if default_library_is_fast() and terms.is_low_rank:
        return False
    bias = [terms.key_bias, *(tensor for term in terms.static for tensor in term)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in bias if tensor is not None):
        return True  # the kernel has no gradient for its bias
    return (
        value.dtype in (torch.float32, torch.bfloat16) and len(terms.low_rank) == 1 and value.shape[-2] >= FEWEST_KEYS
    )


def _has_fused_kernel(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> bool:
    if (
        terms.static
        or terms.tiled
        or terms.explicit
        or terms.placed
        or (mask.keep is not None and mask.keep.shape[-2] > 1)
    ):
        return False  # the bias would be as large as all logits
    bias = terms.key_bias
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return False
    has_mask = mask.keep is not None or bias is not None
    if mask.causal_offset is not None and (has_mask or not _is_zero(mask.causal_offset)):
        return False
    query, key = (factor[:1, :1] for factor in joined_factors(terms.low_rank, value))
    query, key, one_value = _padded_to_one_width(query, key, value[:1, :1])
    mask_row = value.new_zeros(()).expand(1, 1, query.shape[-2], key.shape[-2]) if has_mask else None
    return has_fused_attention(query, key, one_value, mask_row, dropout, mask.causal_offset is not None)


def sdpa_attention(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0) -> torch.Tensor:
    """The output (B, H, Lq, d_v); the weights never exist as a tensor."""
    query, key = joined_factors(terms.low_rank, value)
    key = key.expand(value.shape[0], -1, -1, -1)
    bias: torch.Tensor | None = None
    if _key_bias_needs_gradient(terms):
        query, key = _append_key_bias(query, key, cast(torch.Tensor, terms.key_bias))
    elif not (terms.is_low_rank and terms.key_bias is None):
        bias, _ = KernelTerms.of(replace(terms, low_rank=[]), value).logits(key.shape[-2])
    causal = mask.causal_offset is not None
    if causal and bias is None and mask.keep is None and _is_zero(mask.causal_offset):
        attention_mask = visible = None
    else:
        causal = False
        visible = mask.visible(query.shape[-2], key.shape[-2], query.device)
        attention_mask = visible if bias is None else bias.to(value.dtype)
        if bias is not None and visible is not None:
            attention_mask = attention_mask.masked_fill(~visible, float("-inf"))  # type: ignore[union-attr]
    sees_a_key = None
    if exporting() and attention_mask is not None and visible is not None:
        # Runtimes differ on the softmax of a row of only −inf. We use the dtype's minimum and multiply such rows by 0.
        least = torch.finfo(value.dtype).min
        attention_mask = torch.where(visible, value.new_zeros(()) if bias is None else attention_mask, least)
        sees_a_key = visible.any(-1, keepdim=True)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(value.shape[0], *attention_mask.shape[1:])
        if attention_mask.shape[-2] == 1:
            attention_mask = attention_mask.contiguous()  # small, and the kernel is slow with a batch stride of 0
    output = kernel_attention(query, key, value, attention_mask, dropout, causal=causal)
    return output if sees_a_key is None else output * sees_a_key


def kernel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    *,
    scale: float = 1.0,
    causal: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` for queries and values of any width."""
    width = value.shape[-1]
    query, key, value = _padded_to_one_width(query, key, value)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return output[..., :width] if output.shape[-1] > width else output


def _key_bias_needs_gradient(terms: Terms) -> bool:
    """Whether the key bias needs a gradient, which the kernel lacks. False in a graph, which serves both cases."""
    needs_gradient = terms.key_bias is not None and terms.key_bias.requires_grad and torch.is_grad_enabled()
    return needs_gradient and terms.is_low_rank and not traced()


def _append_key_bias(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the key bias to the keys, and ones to the queries. The kernel has gradients for both."""
    batch, heads, length, _ = key.shape
    column = bias.to(key.dtype).transpose(-1, -2).expand(batch, heads, length, 1)
    return torch.cat((query, query.new_ones(*query.shape[:-1], 1)), -1), torch.cat((key, column), -1)


def _is_zero(offset: int | torch.Tensor | None) -> bool:
    return isinstance(offset, int) and offset == 0


def _padded_to_one_width(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad the narrower tensors with zeros: fused kernels need one width for query, key and value."""
    padding = query.shape[-1] - value.shape[-1]
    if padding > 0:
        value = functional.pad(value, (0, padding))
    elif padding < 0:
        query, key = functional.pad(query, (0, -padding)), functional.pad(key, (0, -padding))
    return query, key, value
