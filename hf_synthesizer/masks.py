"""What joins the logits before the softmax: who may be looked at, an additive bias, causality.

Transformers hands each attention backend another kind of mask (eager a float tensor, sdpa a bool tensor or None), always
one number for each query and key. `AttentionMask` is the one kind that `attend` knows, and it finds out what a mask is made
of: most are a mask of keys, or that and a triangle, and both can be served without touching L² numbers in each layer.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_SIMPLIFIED = (
    WeakTensorKeyDictionary()
)  # mask tensor → (its version, what it is made of): all layers get the same tensor


class AttentionMask:
    """`keep` (B or 1, H or 1, Lq or 1, Lk) is True where a query may look; `bias`, of the same kind, is added.

    With `causal_offset` = p, query i sees the keys j ≤ i + p; it stands for a triangle nobody has to build.
    """

    def __init__(
        self,
        keep: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        causal_offset: int | torch.Tensor | None = None,
    ):
        self.keep = keep
        self.bias = bias
        self.causal_offset = causal_offset

    @classmethod
    def from_tensor(cls, mask: torch.Tensor | None, causal_offset: int | torch.Tensor | None = None) -> AttentionMask:
        """From a bool mask (True: look) or an additive one (the dtype's minimum or −inf: do not look)."""
        if mask is None or mask.dtype == torch.bool:
            return cls(keep=mask, causal_offset=causal_offset)
        keep = mask > torch.finfo(mask.dtype).min / 2
        return cls(keep=keep, bias=mask.masked_fill(~keep, 0.0), causal_offset=causal_offset)

    def with_bias(self, bias: torch.Tensor | None) -> AttentionMask:
        """The same mask with one more additive bias."""
        if bias is None:
            return self
        return AttentionMask(self.keep, bias if self.bias is None else self.bias + bias, self.causal_offset)

    def visible(self, query_length: int, key_length: int, device: torch.device) -> torch.Tensor | None:
        """`keep` and causality as one bool tensor, or None when everybody sees everything."""
        if self.causal_offset is None:
            return self.keep
        query = torch.arange(query_length, device=device)[:, None] + self.causal_offset
        triangle = torch.arange(key_length, device=device) <= query  # (Lq, Lk)
        return triangle[None, None] if self.keep is None else self.keep & triangle

    def simplified(self) -> AttentionMask:
        """The same mask with `keep` as a mask of keys (…, 1, Lk), and a triangle, wherever it is made of these.

        Reads the tensor, once for each mask, or in inference mode once for each layer; so not for compiled graphs.
        """
        if self.keep is None or self.keep.shape[-2] == 1 or self.causal_offset is not None:
            return self
        simple = _simplified(self.keep)
        return self if simple is None else AttentionMask(simple[0], self.bias, simple[1])


def _simplified(keep: torch.Tensor) -> tuple[torch.Tensor | None, int | None] | None:
    """`_simplify`, remembered as long as the tensor lives and is not changed."""
    if keep.is_inference():
        return _simplify(keep)  # nothing tells whether such a tensor was changed in place
    known = _SIMPLIFIED.get(keep)
    if known is None or known[0] != keep._version:
        known = _SIMPLIFIED[keep] = (keep._version, _simplify(keep))
    return known[1]


def _simplify(keep: torch.Tensor) -> tuple[torch.Tensor | None, int | None] | None:
    """(keys, causal offset) that mean the same as `keep`, or None if there are none."""
    query_length, key_length = keep.shape[-2:]
    keys = keep[..., -1:, :]  # the last query sees most
    offset: int | None = None
    if not bool((keep == keys).all()):
        offset = key_length - query_length
        visible = AttentionMask(keys, None, offset).visible(query_length, key_length, keep.device)
        if visible is None or not torch.equal(keep, visible):
            return None
    # A copy: a view would keep the whole mask alive, and with it this entry.
    return (None if bool(keys.all()) else keys.clone()), offset


def visible_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The keys (B, Lk) that some query may look at; None where no row starts with padding.

    The last query sees most, except under a mask of the user's own, such as a band.
    """
    if mask is None or (not torch.compiler.is_compiling() and bool(_visible(mask[:, 0, -1, 0]).all())):
        return None
    return _visible(mask).any(2).any(1)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
