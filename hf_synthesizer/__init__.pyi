"""The public names, for type checkers and editors; `__init__.py` imports them when they are first used."""

from .attention import SynthesizerAttention as SynthesizerAttention
from .config import SynthesizerConfig as SynthesizerConfig
from .errors import AlreadyPatchedError as AlreadyPatchedError
from .errors import CheckpointMismatchError as CheckpointMismatchError
from .errors import FusedModelError as FusedModelError
from .errors import InvalidConfigError as InvalidConfigError
from .errors import NoMatchingLayerError as NoMatchingLayerError
from .errors import NotPatchedError as NotPatchedError
from .errors import SequenceTooLongError as SequenceTooLongError
from .errors import SynthesizerError as SynthesizerError
from .errors import UnknownVariantError as UnknownVariantError
from .errors import UnsupportedModelError as UnsupportedModelError
from .faces import Family as Family
from .faces import list_families as list_families
from .faces import register_face as register_face
from .faces import register_family as register_family
from .faces.mixin import SynthesizerMixin
from .inference.fusing import fuse_for_inference as fuse_for_inference
from .inference.fusing import unfuse as unfuse
from .patching.counting import count_flops as count_flops
from .patching.counting import count_parameters as count_parameters
from .patching.loading import from_pretrained_patched as from_pretrained_patched
from .patching.report import patch_report as patch_report
from .patching.swap import patch_model as patch_model
from .patching.swap import unpatch_model as unpatch_model
from .pictures import attention_page as attention_page
from .synthesizers import DenseSynthesizer as DenseSynthesizer
from .synthesizers import DotProductSynthesizer as DotProductSynthesizer
from .synthesizers import FactorizedDenseSynthesizer as FactorizedDenseSynthesizer
from .synthesizers import FactorizedRandomSynthesizer as FactorizedRandomSynthesizer
from .synthesizers import FixedRandomSynthesizer as FixedRandomSynthesizer
from .synthesizers import MixtureSynthesizer as MixtureSynthesizer
from .synthesizers import RandomSynthesizer as RandomSynthesizer
from .synthesizers import RoutingSynthesizer as RoutingSynthesizer
from .synthesizers import SalienceSynthesizer as SalienceSynthesizer
from .synthesizers import SignALSHSynthesizer as SignALSHSynthesizer
from .synthesizers import SimpleALSHSynthesizer as SimpleALSHSynthesizer
from .synthesizers import SimpleLSHSynthesizer as SimpleLSHSynthesizer
from .synthesizers import SparseFixedSynthesizer as SparseFixedSynthesizer
from .synthesizers import SparseStridedSynthesizer as SparseStridedSynthesizer
from .synthesizers import Synthesizer as Synthesizer
from .synthesizers import XboxALSHSynthesizer as XboxALSHSynthesizer
from .synthesizers import list_variants as list_variants
from .synthesizers import register_variant as register_variant
from .transfer import HeadSuggestion as HeadSuggestion
from .transfer import suggest_heads as suggest_heads
from .transfer import suggest_layers as suggest_layers
from .transfer import transfer_attention as transfer_attention
from .version import __version__ as __version__

class SynthesizerBertSelfAttention(SynthesizerMixin): ...
class SynthesizerT5Attention(SynthesizerMixin): ...
