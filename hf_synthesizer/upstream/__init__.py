"""All private names of Transformers, PyTorch and accelerate that the package uses.

`REGISTER` says what each is for, and what happens without it.

A release of these libraries may remove or rename a private name. Then the package still imports, and the stand-in of
the name serves, or one sentence made of the entry says what does not work. `torch_names` and `transformers_names` hold
the functions that use the names. No other file of the package uses one; tests/upstream checks this, and takes each name
away in turn.

These names are not in the register, by decision:

- `_init_weights`, `_keys_to_ignore_on_load_missing`, `_can_record_outputs` and `config._attn_implementation`:
  Transformers documents them for authors of model classes.
- `nn.Module._load_from_state_dict`: PyTorch documents it for authors of modules. `_apply` is what all of `to`, `half`
  and `cuda` call.
- `_modules`, `_parameters` and `_buffers` of `nn.Module`: every pickled module holds them, so that PyTorch cannot
  rename them.
- `transformers.conversion_mapping` and `transformers.core_model_loading`: Transformers documents both modules for
  authors of models.
- Words in `knows` and `UNDERSTOOD` (`layers/`): they are compared with the words of stock code, and nothing is read by
  them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UnsupportedModelError
from ..version import HOW_TO_INSTALL

logger = logging.getLogger(__name__)


class PrivateName(NamedTuple):
    """One entry of the register. Both texts continue the sentence "torch 2.13 has no `name`, …"."""

    purpose: str
    """What the name does for the package, after "which"."""
    without: str
    """What happens when the name is gone."""
    required: bool = False
    """Whether no model can be patched or loaded without it."""


_HOOKS = PrivateName("tells whether a module has hooks", "each projection is called as a module, which is slower")
_KERNEL = PrivateName("the native kernels call", "other routes serve, which are slower")
_AUTO = PrivateName(
    "holds the classes of an Auto class",
    "AutoModel and its like neither save nor load patched models; load them by their class, "
    "such as hf_synthesizer.SynthesizerBertModel.from_pretrained()",
)
_INPUTS = PrivateName(
    "finds the tokenizer of a config without its import", "tokenizers and processors are imported to be registered"
)
_PATTERNS = PrivateName(
    "holds the patterns of a conversion of names", "the patterns are used as Transformers has processed them"
)

REGISTER: dict[str, PrivateName] = {
    # PyTorch
    "torch._fused_sdp_choice": PrivateName(
        "tells whether a device that is no NVIDIA GPU has a fused kernel", "the route `chunked` serves such devices"
    ),
    "torch.ops.mkldnn._linear_pointwise": PrivateName(
        "is the way to float32 products of oneDNN", "`torch.matmul` multiplies, which is slower on some processors"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": PrivateName(
        "is the operator of attention on processors, of which FlopCounterMode knows no count",
        "the operations are counted in plain attention, which needs more memory",
    ),
    "torch.Tensor._base": PrivateName(
        "is the tensor that a view belongs to", "each view is taken for a tensor of its own, and is read again"
    ),
    "torch.Tensor._version": PrivateName(
        "counts the writes to a tensor", "no answer of a device is kept, and each forward reads its masks again"
    ),
    "torch._assert_async": PrivateName(
        "checks positions in a compiled graph", "torch.compile of this call is refused; call the model uncompiled"
    ),
    "torch._C._are_functorch_transforms_active": PrivateName(
        "tells whether torch.func transforms this call", "transforms of torch.func fail with an error of PyTorch"
    ),
    "torch.nn.modules.module._global_forward_hooks": _HOOKS,
    "torch.nn.modules.module._global_forward_pre_hooks": _HOOKS,
    "torch.nn.modules.module._global_backward_hooks": _HOOKS,
    "torch.nn.modules.module._global_backward_pre_hooks": _HOOKS,
    "torch.nn.modules.module#_forward_hooks": _HOOKS,
    "torch.nn.modules.module#_forward_pre_hooks": _HOOKS,
    "torch.nn.modules.module#_backward_hooks": _HOOKS,
    "torch.nn.modules.module#_backward_pre_hooks": _HOOKS,
    "torch.nn.modules.module#_compiled_call_impl": PrivateName(
        "marks a layer that was compiled by itself",
        "such a layer is patched, and its synthesized layer runs uncompiled",
    ),
    "torch._dynamo.eval_frame#_orig_mod": PrivateName(
        "holds the model in a compiled one", "the error for a compiled model does not name the place of the model"
    ),
    "libtorch_cpu.so:_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb": _KERNEL,
    "libtorch_cpu.so:_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb": _KERNEL,
    "libtorch_cpu.so:_ZN2at6native7cpublas14brgemm_releaseEb": _KERNEL,
    "libtorch_cpu.so:GOMP_parallel": _KERNEL,
    # Transformers
    "transformers.PreTrainedModel._initialize_weights": PrivateName(
        "visits each module of a model that was loaded",
        "patched layers cannot be initialised or checked",
        required=True,
    ),
    "transformers.PreTrainedModel._load_pretrained_model": PrivateName(
        "gets the files of a checkpoint", "their names cannot be checked before they are read", required=True
    ),
    "transformers.modeling_utils#_is_hf_initialized": PrivateName(
        "marks tensors that a checkpoint has filled", "they would get random numbers", required=True
    ),
    "transformers.GenerationMixin._prepare_generated_length": PrivateName(
        "tells generate() how long the user wants it to be",
        "generate() raises for positions beyond max_length when it gets there, and not before it starts",
    ),
    "transformers.GenerationMixin._prepare_cache_for_generation": PrivateName(
        "tells generate() how many tokens there will be",
        "generate() raises for positions beyond max_length when it gets there, and not before it starts",
    ),
    "transformers.PreTrainedModel._upload_modified_files": PrivateName(
        "uploads the files of a push",
        "push_to_hub leaves out model card and shim; call save_pretrained, and upload its folder with huggingface_hub",
    ),
    "transformers.utils.output_capturing._CAN_RECORD_REGISTRY": PrivateName(
        "tells which outputs a class of models records",
        "output_attentions and output_hidden_states may give nothing for patched models",
    ),
    "transformers.models.auto.configuration_auto#_extra_content": PrivateName(
        "holds the model types that packages add to AutoConfig",
        "AutoConfig does not know patched checkpoints; load them by their class, "
        "such as hf_synthesizer.SynthesizerBertModel.from_pretrained()",
    ),
    "transformers.models.auto.auto_factory#_model_mapping": _AUTO,
    "transformers.models.auto.auto_factory#_modules": PrivateName(
        "holds the modules of an Auto class", "the classes of all heads are made when a model is patched"
    ),
    "transformers.models.auto.auto_factory#_extra_content": _INPUTS,
    "transformers.models.auto.auto_factory#_config_mapping": _INPUTS,
    "transformers.models.auto.auto_factory#_reverse_config_mapping": _INPUTS,
    "transformers.core_model_loading#_original_source_patterns": _PATTERNS,
    "transformers.core_model_loading#_original_target_patterns": _PATTERNS,
    "transformers.core_model_loading#_weight_conversions": PrivateName(
        "holds the conversions of names that saving undoes",
        "models whose names Transformers converts cannot be saved when they are patched",
    ),
    # accelerate
    "accelerate.hooks#_hf_hook": PrivateName(
        "holds the hook of an offloaded module",
        "a module counts as offloaded if its object has a forward and its weights are on the meta device",
    ),
    "accelerate.hooks#_old_forward": PrivateName(
        "holds the forward of a module that has a hook", "the copy of an offloaded layer keeps one attribute too many"
    ),
}
"""The forms of a name: `module.Class.name`; `module#name` for an attribute of objects, if the source of the module has
this name; `libtorch_cpu.so:symbol`."""


def look_up(path: str) -> Any:
    """What a name of the register refers to; for an attribute of objects, its name. None if it is gone."""
    if path not in REGISTER:
        raise KeyError(f"{path} is not in the register of private names")
    return _resolve(path)


def explain_missing(path: str) -> str:
    """The sentence that says what does not work without a name."""
    package, *_, name = re.split(r"[.#:]", path.replace("libtorch_cpu.so", "torch"))
    entry = REGISTER[path]
    return f"{package} {_version_of(package)} has no {name}, which {entry.purpose}: {entry.without}"


@cache
def warn_missing(path: str) -> None:
    """Log once that a name is gone."""
    logger.warning("%s.", explain_missing(path))


def require_missing_nothing() -> None:
    """Raise an error if a name is gone without which no model can be patched or loaded.

    Raises:
        UnsupportedModelError: it names the first such name.
    """
    missing = _missing_required()
    if missing:
        raise unsupported(missing)


@cache
def _missing_required() -> str | None:
    return next((path for path, entry in REGISTER.items() if entry.required and look_up(path) is None), None)


def unsupported(path: str) -> UnsupportedModelError:
    """The error for what cannot work without a name."""
    package = path.partition(".")[0]
    return UnsupportedModelError(
        f"{explain_missing(path)}. Install an older {package}, or a newer hf_synthesizer ({HOW_TO_INSTALL})."
    )


def _resolve(path: str) -> Any:
    if path.startswith("libtorch_cpu.so:"):
        return _symbol_address(path.partition(":")[2])
    module, _, name = path.partition("#")
    if name:
        return name if name in _source(module) else None
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


@cache
def _source(module: str) -> str:
    """The source of a module, without its import; empty if there is none."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _symbol_address(symbol: str) -> ctypes.c_void_p | None:
    """The address of a function of PyTorch's library for processors."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p) if hasattr(library, symbol) else None


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
