"""The public names, for type checkers and editors; `__init__.py` imports them when they are first used."""

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
from .inference.fusing import fuse_for_inference as fuse_for_inference
from .inference.fusing import unfuse as unfuse
from .layers import ModelType as ModelType
from .layers import list_model_types as list_model_types
from .layers import register_layer as register_layer
from .layers import register_model_type as register_model_type
from .layers.mixin import SynthesizerMixin
from .layers.standalone import SynthesizerAttention as SynthesizerAttention
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
from .synthesizers import RelativeDenseSynthesizer as RelativeDenseSynthesizer
from .synthesizers import RelativeSynthesizer as RelativeSynthesizer
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
from .transfer import Suggestion as Suggestion
from .transfer import suggest_heads as suggest_heads
from .transfer import suggest_layers as suggest_layers
from .transfer import transfer_attention as transfer_attention
from .version import __version__ as __version__

class SynthesizerBertSelfAttention(SynthesizerMixin): ...
class SynthesizerT5Attention(SynthesizerMixin): ...
