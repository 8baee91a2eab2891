"""The base class of rules that choose keys."""

from __future__ import annotations

from typing import ClassVar

import torch

from .tokens import Tokens


class Choice:
    """A rule that says which keys each query may attend to.

    `chosen` defines the rule in plain operations that a compiler can record. The sparse route of `attend` must choose
    the same pairs without that tensor.
    """

    causal: ClassVar[bool] = False
    """Whether the rule needs only the past of a query."""

    def chosen(self, query: torch.Tensor, key: torch.Tensor, tokens: Tokens, causal: bool) -> torch.Tensor:
        """Which keys are chosen: bool (B or 1, H or 1, Lq, Lk).

        The caller hides padding, queries at padding and, with `causal`, the future.

        Args:
            query: (B, H, Lq, r), before any scaling.
            key: (B, H, Lk, r).
            tokens: which keys are tokens, and the positions of all.
            causal: whether the layer is a decoder's.
        """
        raise TypeError(f"{type(self).__name__} must define chosen()")
