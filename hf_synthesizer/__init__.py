"""Synthesizer attention (Tay et al., ICML 2021) as a drop-in for Hugging Face Transformers models.

A name is imported when it is first used; the synthesized classes of each model (`SynthesizerLlamaForCausalLM`) are made then.
"""

# isort: off
# fmt: off
import importlib
from typing import Any

from .models.on_import import serve_when_imported
from .version import __version__ as __version__

_WHERE = {
    ".layers.standalone": ("SynthesizerAttention",),
    ".synthesizers.config": ("SynthesizerConfig",),
    ".measuring.flops": ("count_flops",),
    ".synthesizers.parameters": ("count_parameters",),
    ".errors": (
        "AlreadyPatchedError", "CheckpointMismatchError", "FusedModelError", "InvalidConfigError", "NoMatchingLayerError",
        "NotPatchedError", "SequenceTooLongError", "SynthesizerError", "UnknownVariantError", "UnsupportedModelError",
    ),
    ".layers": ("ModelType", "list_model_types", "register_layer", "register_model_type"),
    ".inference.fusing": ("fuse_for_inference", "unfuse"),
    ".models": ("SynthesizerBertSelfAttention", "SynthesizerT5Attention"),
    ".pictures": ("attention_page",),
    ".patching.loading": ("from_pretrained_patched",),
    ".layers.patch_report": ("patch_report",),
    ".patching.swap": ("patch_model", "unpatch_model"),
    ".synthesizers": (
        "DenseSynthesizer", "DotProductSynthesizer", "FactorizedDenseSynthesizer", "FactorizedRandomSynthesizer",
        "FixedRandomSynthesizer", "MixtureSynthesizer", "RandomSynthesizer", "RelativeDenseSynthesizer", "RelativeSynthesizer",
        "RoutingSynthesizer", "SalienceSynthesizer", "SignALSHSynthesizer", "SimpleALSHSynthesizer", "SimpleLSHSynthesizer",
        "SparseFixedSynthesizer", "SparseStridedSynthesizer", "Synthesizer", "XboxALSHSynthesizer", "list_variants",
        "register_variant",
    ),
    ".transfer": ("Suggestion", "suggest_heads", "suggest_layers", "transfer_attention"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])
# fmt: on


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name, ".models" if name.startswith("Synthesizer") else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return __all__


serve_when_imported()
