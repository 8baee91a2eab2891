"""Synthesizer attention (Tay et al., ICML 2021) as a drop-in for Hugging Face Transformers models."""

# isort: off
# fmt: off
from .attention import SynthesizerAttention
from .config import SynthesizerConfig
from .patching.counting import count_flops, count_parameters
from .errors import (
    AlreadyPatchedError, CheckpointMismatchError, FusedModelError, InvalidConfigError, NoMatchingLayerError,
    NotPatchedError, SequenceTooLongError, SynthesizerError, UnknownVariantError, UnsupportedModelError,
)
from .faces import Family, list_families, load_built_in_families, register_family
from .inference.fusing import fuse_for_inference, unfuse
from .patching.loading import from_pretrained_patched
from .patching.swap import patch_model, unpatch_model
from .patching.report import patch_report
from .synthesizers import (
    DenseSynthesizer, DotProductSynthesizer, FactorizedDenseSynthesizer, FactorizedRandomSynthesizer,
    FixedRandomSynthesizer, MixtureSynthesizer, RandomSynthesizer, RoutingSynthesizer, SalienceSynthesizer,
    SignALSHSynthesizer, SimpleALSHSynthesizer, SimpleLSHSynthesizer, SparseFixedSynthesizer, SparseStridedSynthesizer,
    Synthesizer, XboxALSHSynthesizer, list_variants, register_variant,
)
from .transfer import suggest_layers, transfer_attention
from .version import __version__

__all__ = [
    "AlreadyPatchedError", "CheckpointMismatchError", "DenseSynthesizer", "DotProductSynthesizer",
    "FactorizedDenseSynthesizer", "FactorizedRandomSynthesizer", "Family", "FixedRandomSynthesizer",
    "FusedModelError", "InvalidConfigError", "MixtureSynthesizer", "NoMatchingLayerError", "NotPatchedError",
    "RandomSynthesizer", "RoutingSynthesizer", "SalienceSynthesizer", "SequenceTooLongError", "SignALSHSynthesizer",
    "SimpleALSHSynthesizer", "SimpleLSHSynthesizer", "SparseFixedSynthesizer", "SparseStridedSynthesizer",
    "Synthesizer", "SynthesizerAttention", "SynthesizerConfig", "SynthesizerError", "UnknownVariantError",
    "UnsupportedModelError", "XboxALSHSynthesizer", "__version__",
    "count_flops", "count_parameters", "from_pretrained_patched", "fuse_for_inference", "list_families",
    "list_variants", "patch_model", "patch_report", "register_family", "register_variant", "suggest_layers",
    "transfer_attention", "unfuse", "unpatch_model",
]
# fmt: on

load_built_in_families()
