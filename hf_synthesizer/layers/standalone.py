"""A self-attention layer of its own, for models that are not Transformers models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..attend import attend
from ..device.matmul import linear
from ..errors import InvalidConfigError
from ..logits.masks import AttentionMask
from ..synthesizers import build_synthesizer
from ..synthesizers.config import HeadGroupsConfig, LayerConfig, SynthesizerConfig, layer_config


class SynthesizerAttention(nn.Module):
    """Multi-head self-attention `softmax(S(x) + mask) · V(x)` with synthesized logits, and an output projection.

    Args:
        hidden_size: the width d of the input.
        num_heads: the number H of heads; it divides `hidden_size`.
        variant: a variant's name or a mixture, a `SynthesizerConfig`, or several with `heads=[…]` for groups of heads.
        max_length: the longest sequence N; needed unless the config names it.
        dropout: the probability with which a weight is dropped in training.
        **options: further fields of `SynthesizerConfig`.

    Example:
        >>> import torch
        >>> from hf_synthesizer import SynthesizerAttention
        >>> layer = SynthesizerAttention(64, 4, variant="factorized_dense", max_length=32)
        >>> output, weights = layer(torch.randn(2, 20, 64))
        >>> output.shape, weights.shape
        (torch.Size([2, 20, 64]), torch.Size([2, 4, 20, 20]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        variant: str | SynthesizerConfig | Sequence[SynthesizerConfig] = "dense",
        max_length: int | None = None,
        *,
        dropout: float = 0.0,
        **options: Any,
    ):
        super().__init__()
        if hidden_size % num_heads:
            raise InvalidConfigError(f"hidden_size = {hidden_size} is not a multiple of num_heads = {num_heads}.")
        requested = variant
        if isinstance(requested, str):
            requested = SynthesizerConfig(requested, max_length=max_length, **options)
        elif isinstance(requested, SynthesizerConfig):
            requested = requested.replace(**options, **({} if max_length is None else {"max_length": max_length}))
        elif options:
            raise InvalidConfigError(f"Options of groups of heads belong into their configurations: {options!r}.")
        config: LayerConfig = layer_config(requested, num_heads)
        if max_length is not None and isinstance(config, HeadGroupsConfig):
            config = config.for_length(max_length)
        if config.lacks_length:
            raise InvalidConfigError("max_length is missing: a synthesizer needs to know its longest sequence N.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.synthesizer = build_synthesizer(config, hidden_size, num_heads, config.max_length or 0)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        need_weights: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output (B, L, d), and weights (B, H, L, L), or None without `need_weights` (which is faster).

        Args:
            hidden_states: (B, L, d).
            attention_mask: (B, L), nonzero for tokens and 0 for padding, or any mask that broadcasts to (B, H, L, L):
                bool (True: look) or additive.
            is_causal: whether a token may look at earlier tokens and itself only.
            need_weights: whether the weights are returned too.
        """
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()[:, None, None, :]
        mask = AttentionMask.from_tensor(attention_mask, causal_offset=0 if is_causal else None)
        batch, length, _ = hidden_states.shape
        value = linear(self.value, hidden_states).view(batch, length, self.num_heads, -1).transpose(1, 2)
        output, weights = attend(
            self.synthesizer(hidden_states),
            value,
            mask,
            dropout=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )
        return linear(self.output, output.transpose(1, 2).reshape(batch, length, -1)), weights
