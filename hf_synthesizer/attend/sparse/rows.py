"""Rows of the batch that the sparse route computes together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..sdpa import kernel_attention


@dataclass(frozen=True)
class Rows:
    """Rows of the batch with the same first and last token, without the padding around them.

    `query` and `key` are (b, H, n, r), before scaling, `value` (b, H, n, d_v), `bias` broadcasts to (b, H, n, n) or is
    None. `holes` (b, n) is False at padding between tokens, or None without such padding.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    holes: torch.Tensor | None
    scaling: float
    dropout: float
    causal: bool

    @property
    def length(self) -> int:
        return self.value.shape[-2]

    @property
    def is_plain(self) -> bool:
        """Whether no mask is needed: no padding, no bias, not causal."""
        return self.bias is None and self.holes is None and not self.causal

    def of_heads(self, heads: slice) -> Rows:
        bias = self.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, heads]
        return replace(self, query=self.query[:, heads], key=self.key[:, heads], value=self.value[:, heads], bias=bias)

    def of_row(self, number: int) -> tuple[Rows, torch.Tensor]:
        """One row with the padding between its tokens removed, and the indices of its tokens."""
        tokens = self.holes[number].nonzero().squeeze(-1)  # type: ignore[index]
        bias = self.bias
        if bias is not None:
            bias = bias[number if len(bias) > 1 else 0, None][..., tokens]
            bias = bias if bias.shape[-2] == 1 else bias[..., tokens, :]
        query, key, value = (x[number, None, :, tokens] for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, bias=bias, holes=None), tokens

    def additive_mask(self, i: torch.Tensor, j: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """The additive mask of the pairs (i, j): (1 or b, 1 or H, *P), −∞ where a query does not see a key.

        A float tensor even without a bias: the kernel would convert a bool tensor for each head.

        The indices `i` and `j` broadcast with `allowed` to P. Indices beyond the row are not allowed.
        """
        i, j = i.clamp(0, self.length - 1), j.clamp(0, self.length - 1)
        if self.causal:
            allowed = allowed & (j <= i)
        allowed = allowed.expand(torch.broadcast_shapes(i.shape, j.shape))[None, None]
        if self.holes is not None:
            allowed = allowed & self.holes[:, j].unsqueeze(1)
        if self.bias is None:
            bias = torch.zeros(allowed.shape, dtype=self.query.dtype, device=j.device)
        else:
            bias = self.bias[..., 0, :][..., j] if self.bias.shape[-2] == 1 else self.bias[..., i, j]
        return bias.to(self.query.dtype).masked_fill(~allowed, float("-inf"))

    def mask_within(self, indices: torch.Tensor) -> torch.Tensor | None:
        """`additive_mask` for p groups of tokens that attend to each other, at these indices (p, size).

        None if no mask is needed.
        """
        if self.is_plain and indices.numel() == self.length:
            return None
        i, j = indices.unsqueeze(-1), indices.unsqueeze(-2)
        return self.additive_mask(i, j, j < self.length)

    def dense_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Dense attention in p groups, with tensors (b, H, p, …, …) and a mask from `additive_mask`.

        A query without a visible key gets zeros.
        """
        batch, heads = self.value.shape[:2]
        if mask is not None:
            mask = mask.expand(batch, heads, -1, -1, -1).flatten(0, 1)
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        output = kernel_attention(query, key, value, mask, self.dropout, scale=self.scaling)
        return output.unflatten(0, (batch, heads))

    def indices(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.value.device)

    def without_holes(self, output: torch.Tensor) -> torch.Tensor:
        """The output with zeros at padding."""
        return output if self.holes is None else output * self.holes[:, None, :, None]
