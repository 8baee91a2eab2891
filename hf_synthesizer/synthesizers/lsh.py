"""Attention to the best keys by asymmetric hashing. The variants differ in how they transform queries and keys.

With x̂ = x / ‖x‖ and M the largest norm of the row's keys:

| variant | P(k) | Q(q) | from |
|---|---|---|---|
| `lsh_simple` | k/M, √(1 − ‖k/M‖²) | q̂, 0 | Neyshabur & Srebro 2015, Simple-LSH |
| `alsh_simple` | k/M, √(1 − ‖k/M‖²), 0 | q/M, 0, √(1 − ‖q/M‖²) | the same, Simple-ALSH |
| `alsh_xbox` | k, √(M² − ‖k‖²) | q, 0; with `qnf` M·q̂, 0 | Bachrach et al. 2014; Huang et al. 2018 |
| `alsh_sign` | y, ½ − ‖y‖², ½ − ‖y‖⁴, with y = ¾·k/M | ¾·q/M, 0, 0; with `qnf` q̂, 0, 0 | Shrivastava & Li 2015 (m = 2, U = ¾) |

`choices/hashing.py` chooses the keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from ..choices import Buckets
from ..choices.hashing import Transformed
from .options import Option
from .registry import register_variant
from .shared_projection import SharedProjectionSynthesizer

SCALE = 0.75  # U of Sign-ALSH


def simple_lsh(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """q̂, 0 and k/M, √(1 − ‖k/M‖²)."""
    key = key / bound
    return _append(_normalised(query), 0.0), torch.cat((key, _complement(key)), dim=-1)


def simple_alsh(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """q/M, 0, √(1 − ‖q/M‖²) and k/M, √(1 − ‖k/M‖²), 0."""
    query, key = query / bound, key / bound
    return (
        torch.cat((_append(query, 0.0), _complement(query)), dim=-1),
        _append(torch.cat((key, _complement(key)), dim=-1), 0.0),
    )


def xbox(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """q, 0 and k, √(M² − ‖k‖²)."""
    return _append(query, 0.0), torch.cat((key, _complement(key / bound) * bound), dim=-1)


def xbox_normalised(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """M·q̂, 0 and k, √(M² − ‖k‖²)."""
    return xbox(_normalised(query) * bound, key, bound)


def sign_alsh(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """¾·q/M, 0, 0 and y, ½ − ‖y‖², ½ − ‖y‖⁴."""
    key = key * (SCALE / bound)
    square = key.square().sum(-1, keepdim=True)
    return (
        _append(_append(query * (SCALE / bound), 0.0), 0.0),
        torch.cat((key, 0.5 - square, 0.5 - square.square()), dim=-1),
    )


def sign_alsh_normalised(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Transformed:
    """q̂, 0, 0 and y, ½ − ‖y‖², ½ − ‖y‖⁴."""
    return sign_alsh(_normalised(query) * (bound / SCALE), key, bound)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1)


def _complement(x: torch.Tensor) -> torch.Tensor:
    """√(1 − ‖x‖²): (…, 1)."""
    return (1 - x.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()


def _append(x: torch.Tensor, number: float) -> torch.Tensor:
    return functional.pad(x, (0, 1), value=number)


QNF = Option(False, "whether queries are normalised before they are hashed")


class HashSynthesizer(SharedProjectionSynthesizer):
    """Shared queries and keys; a query attends to the `bucket_size` best keys that `num_hashes` hashes find.

    The directions of the hashes are drawn once with torch's generator, and saved.
    """

    options = {
        "bucket_size": Option(32, "how many keys a query chooses"),
        "num_hashes": Option(4, "how many hashes look for them; more find better keys, and cost more", most=1_024),
    }
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
        with_qnf = self.config.options.get("qnf", False)
        transform = type(self).transform_with_qnf if with_qnf else type(self).transform
        return Buckets(transform, self.directions, self.bucket_size)  # type: ignore[arg-type]


@register_variant("lsh_simple")
class SimpleLSHSynthesizer(HashSynthesizer):
    """Simple-LSH (Neyshabur & Srebro 2015).

    `lsh_simple` hashes normalised queries, and keys divided by the longest.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Simple-LSH finds"
    transform = staticmethod(simple_lsh)


@register_variant("alsh_simple")
class SimpleALSHSynthesizer(HashSynthesizer):
    """Simple-ALSH (Neyshabur & Srebro 2015).

    `alsh_simple` hashes queries and keys divided by the longest key.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Simple-ALSH finds"
    transform = staticmethod(simple_alsh)
    extra_width = 2


@register_variant("alsh_xbox")
class XboxALSHSynthesizer(HashSynthesizer):
    """XBOX (Bachrach et al. 2014); `qnf` scales queries to the norm of the longest key (Huang et al. 2018).

    `alsh_xbox` hashes queries and keys as they are; with `qnf`, queries as long as the longest key.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that XBOX finds"
    options = {**HashSynthesizer.options, "qnf": QNF}
    transform = staticmethod(xbox)
    transform_with_qnf = staticmethod(xbox_normalised)


@register_variant("alsh_sign")
class SignALSHSynthesizer(HashSynthesizer):
    """Sign-ALSH (Shrivastava & Li 2015) with m = 2 and U = 0.75; `qnf` scales queries to norm 1.

    `alsh_sign` hashes shortened queries and keys; with `qnf`, queries of length 1.
    """

    formula = "x̃_i[h] · x̃_j[h] · scaling for the best j that Sign-ALSH finds"
    options = {**HashSynthesizer.options, "qnf": QNF}
    transform = staticmethod(sign_alsh)
    transform_with_qnf = staticmethod(sign_alsh_normalised)
    extra_width = 2
