"""The synthesizing functions: modules that make attention logits, one file for each, in plain PyTorch."""

from __future__ import annotations

from ..errors import InvalidConfigError, SynthesizerError, first_line
from .base import Synthesizer
from .config import HeadGroupsConfig, LayerConfig
from .dense import DenseSynthesizer
from .dot_product import DotProductSynthesizer
from .factorized_dense import FactorizedDenseSynthesizer
from .factorized_random import FactorizedRandomSynthesizer
from .head_groups import HeadGroups
from .lsh import SignALSHSynthesizer, SimpleALSHSynthesizer, SimpleLSHSynthesizer, XboxALSHSynthesizer
from .mixture import MixtureSynthesizer
from .random import FixedRandomSynthesizer, RandomSynthesizer
from .registry import get_variant, list_variants, register_variant
from .relative import RelativeSynthesizer
from .relative_dense import RelativeDenseSynthesizer
from .routing import RoutingSynthesizer
from .salience import SalienceSynthesizer
from .sparse_patterns import SparseFixedSynthesizer, SparseStridedSynthesizer

__all__ = [
    "DenseSynthesizer",
    "DotProductSynthesizer",
    "FactorizedDenseSynthesizer",
    "FactorizedRandomSynthesizer",
    "FixedRandomSynthesizer",
    "HeadGroups",
    "MixtureSynthesizer",
    "RandomSynthesizer",
    "RelativeDenseSynthesizer",
    "RelativeSynthesizer",
    "RoutingSynthesizer",
    "SalienceSynthesizer",
    "SignALSHSynthesizer",
    "SimpleALSHSynthesizer",
    "SimpleLSHSynthesizer",
    "SparseFixedSynthesizer",
    "SparseStridedSynthesizer",
    "Synthesizer",
    "XboxALSHSynthesizer",
    "build_synthesizer",
    "list_variants",
    "register_variant",
]


def build_synthesizer(
    config: LayerConfig, hidden_size: int, num_heads: int, max_length: int, *, head_dim: int | None = None
) -> Synthesizer:
    """Build the synthesizer that a configuration describes, initialised with torch's generator.

    Raises:
        InvalidConfigError: for tables that are larger than memory.
    """
    length = config.max_length or max_length
    if isinstance(config, HeadGroupsConfig):
        return HeadGroups(hidden_size, num_heads, length, config, head_dim=head_dim, build=build_synthesizer)
    cls = MixtureSynthesizer if len(config.parts) > 1 else get_variant(config.variant)
    try:
        return cls(hidden_size, num_heads, length, config, head_dim=head_dim)
    except (RuntimeError, OverflowError, MemoryError) as error:
        if isinstance(error, SynthesizerError):
            raise
        settings = ", ".join(
            f"{name}={value}" for name, value in {"max_length": length, **config.non_default()}.items()
        )
        raise InvalidConfigError(
            f"{config.variant!r} with {settings} cannot be built: {first_line(error).rstrip('.')}. Lower max_length, or the options "
            f"that set its size."
        ) from error
