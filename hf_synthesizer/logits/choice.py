"""What every choice of keys is."""

from __future__ import annotations

from typing import ClassVar

import torch

from .tokens import Tokens


class Choice:
    """A rule that says which keys each query may attend to.

    `chosen` is its meaning, in plain operations that a compiler can record; the fast routes of `attend` must let the same
    pairs meet without ever making that tensor.
    """

    causal: ClassVar[bool] = False
    """Whether the rule can be followed by a query that knows the past alone."""

    def chosen(self, query: torch.Tensor, key: torch.Tensor, tokens: Tokens, causal: bool) -> torch.Tensor:
        """Which keys are chosen: bool (B or 1, H or 1, Lq, Lk).

        It need not care about what else is hidden: padding, queries on padding and, with `causal`, the future are struck
        out by who asks.

        Args:
            query: (B, H, Lq, r), before any scaling.
            key: (B, H, Lk, r).
            tokens: which keys are no padding, and where all stand.
            causal: whether the layer is a decoder's.
        """
        raise TypeError(f"{type(self).__name__} must define chosen()")
