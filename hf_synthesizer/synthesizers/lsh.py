"""Attention to the best keys by asymmetric hashing. The variants differ in how they transform queries and keys."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..choices import Buckets
from ..choices.hashing import (
    sign_alsh,
    sign_alsh_normalised,
    simple_alsh,
    simple_lsh,
    xbox,
    xbox_normalised,
)
from .registry import register_variant
from .shared_projection import SharedProjectionSynthesizer


class HashSynthesizer(SharedProjectionSynthesizer):
    """Shared queries and keys; a query attends to the `bucket_size` best keys that `num_hashes` hashes find.

    The directions of the hashes are drawn once with torch's generator, and saved.
    """

    options = frozenset({"bucket_size", "num_hashes"})
    whole_sequence = True
    transform: ClassVar[staticmethod]
    """The transform of queries and keys."""
    transform_with_qnf: ClassVar[staticmethod]
    """The same with the option `qnf`, which normalises queries."""
    extra_width: ClassVar[int] = 1
    """The number of columns that the transform adds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        width = self.head_dim + self.extra_width
        self.register_buffer("directions", torch.randn(self.config.num_hashes, width, width))  # (T, d', d')

    @property
    def bucket_size(self) -> int:
        """The option, but at most `max_length`: a traced graph allocates a place for each."""
        return min(self.config.bucket_size, self.max_length)

    def choice(self) -> Buckets:
        transform = type(self).transform_with_qnf if self.config.qnf else type(self).transform
        return Buckets(transform, self.directions, self.bucket_size)  # type: ignore[arg-type]


@register_variant("lsh_simple")
class SimpleLSHSynthesizer(HashSynthesizer):
    """Simple-LSH (Neyshabur & Srebro 2015)."""

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Simple-LSH finds"
    transform = staticmethod(simple_lsh)


@register_variant("alsh_simple")
class SimpleALSHSynthesizer(HashSynthesizer):
    """Simple-ALSH (Neyshabur & Srebro 2015)."""

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Simple-ALSH finds"
    transform = staticmethod(simple_alsh)
    extra_width = 2


@register_variant("alsh_xbox")
class XboxALSHSynthesizer(HashSynthesizer):
    """XBOX (Bachrach et al. 2014); `qnf` scales queries to the norm of the longest key (Huang et al. 2018)."""

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that XBOX finds"
    options = HashSynthesizer.options | {"qnf"}
    transform = staticmethod(xbox)
    transform_with_qnf = staticmethod(xbox_normalised)


@register_variant("alsh_sign")
class SignALSHSynthesizer(HashSynthesizer):
    """Sign-ALSH (Shrivastava & Li 2015) with m = 2 and U = 0.75; `qnf` scales queries to norm 1."""

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Sign-ALSH finds"
    options = HashSynthesizer.options | {"qnf"}
    transform = staticmethod(sign_alsh)
    transform_with_qnf = staticmethod(sign_alsh_normalised)
    extra_width = 2
