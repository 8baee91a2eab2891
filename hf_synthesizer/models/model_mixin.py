"""Mixed into the classes of patched models: how such a model is built, loaded, saved and pushed."""

from __future__ import annotations

import re
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import UnsupportedModelError
from ..layers.guard import Guard
from ..upstream import look_up, warn_missing
from ..upstream.transformers_names import LOADED
from .description import remember_fingerprints
from .initialization import initialize_layers

_BUILDING: ContextVar[Any] = ContextVar("_BUILDING", default=None)
"""The config of the patched model that is in its `__init__`."""


class SynthesizerModelMixin:
    """Mixed into a stock model class: builds the patched layers that `config.synthesizer` describes, and checks that a
    checkpoint has their tensors.
    """

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        from .installing import rebuild

        outer = _BUILDING.get()
        token = _BUILDING.set(config)
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        finally:
            _BUILDING.reset(token)
        # A head may build its base with `AutoModel.from_config(config)`, as Llama's does. The description is that of the head,
        # which patches the layers of the base when its own `__init__` ends.
        if type(outer) is not type(config) or outer.synthesizer != config.synthesizer:
            rebuild(self)  # type: ignore[arg-type]

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Transformers calls this for each module of a model, or of a part of a composite model, that it has filled; for the
        # model itself at the end.
        if module is self and not getattr(self, LOADED, False):  # type: ignore[comparison-overlap]
            initialize_layers(self)  # type: ignore[arg-type]
        if isinstance(module, Guard):
            self.initialize_guard(module)
        else:
            super()._initialize_weights(module)  # type: ignore[misc]

    def initialize_guard(self, guard: Guard) -> None:
        """Check a guard that a checkpoint has filled; fill any other."""
        if getattr(guard.weight, LOADED, False):
            names = (name for name, module in self.named_modules() if module is guard)  # type: ignore[attr-defined]
            guard.require(repr(next(names).rpartition(".")[0]))
        else:
            guard.renew()  # not in the checkpoint: whatever was in memory

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the stock class. Transformers converts names only for its own classes, and relies on them to keep loaded weights."""
        from ..checkpoints.conversions import AS_IN_MEMORY

        stock = cls.__mro__[cls.__mro__.index(SynthesizerModelMixin) + 1]
        return AS_IN_MEMORY.get() or stock.is_custom_code()  # type: ignore[attr-defined]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: every checkpoint has the shim already, and needs no copy of this module."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, but strict: the patched layers are exactly those of config.json.

        Raises:
            CheckpointMismatchError: if a tensor of a patched layer is missing, has another shape, has no place, or belongs to
                another patch; if a file is damaged; if a description is newer than this version or unknown to it.
        """
        from ..checkpoints.conversions import has_names_of_memory, names_of_memory
        from ..checkpoints.explained_errors import explain_load_errors
        from ..checkpoints.files import require_own_files, require_safetensors
        from ..checkpoints.loaded_weights import align_in_memory, unify_precision
        from ..checkpoints.matching import require_match

        name = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched = kwargs.pop("ignore_mismatched_sizes", False)
        require_safetensors(name, kwargs.pop("use_safetensors", None))
        if name is not None:
            require_own_files(name, **kwargs)
        hub_arguments = {key: kwargs[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in kwargs}

        def load() -> Any:
            return super(SynthesizerModelMixin, cls).from_pretrained(  # type: ignore[misc]
                name,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `require_match` refuses them, and names them
                use_safetensors=True,
                **kwargs,
            )

        remember_fingerprints(name)
        with explain_load_errors(name, **hub_arguments):
            model, info = load()
            if has_names_of_memory(model, info):
                with names_of_memory():
                    model, info = load()
        require_match(model, info, name, ignore_mismatched)
        unify_precision(model)
        align_in_memory(model)
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # `from_pretrained` may have checked another revision, or may read the base of an adapter.
        from ..checkpoints.files import require_own_names

        shards = (load_config.sharded_metadata or {}).get("weight_map", {}).values()
        require_own_names(shards, f"The index of {str(load_config.pretrained_model_name_or_path)!r}")
        load = super(SynthesizerModelMixin, type(model))._load_pretrained_model  # type: ignore[misc]
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def load_adapter(self, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, but never from a pickle.

        Raises:
            CheckpointMismatchError: for an adapter that is one.
        """
        from ..checkpoints.files import require_safe_adapter

        if peft_model_id is not None:
            require_safe_adapter(peft_model_id, **{**(kwargs.get("adapter_kwargs") or {}), **kwargs})
        return super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """As Transformers' own, with the shim for `trust_remote_code` and a card.

        Raises:
            UnsupportedModelError: for weights that were quantized in memory, and for layers that no config describes.
        """
        from ..checkpoints.auto import auto_map
        from ..checkpoints.conversions import stock_names
        from ..checkpoints.explained_errors import explain_push_errors
        from ..checkpoints.files import require_plain_tensors
        from ..layers.finding.attention_layers import find_attention_layers
        from .dropped import describe_remaining_layers

        if _has_adapters(self):  # an adapter is saved then, and not this model
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
            return
        attention_layers = find_attention_layers(self)  # type: ignore[arg-type]
        describe_remaining_layers(self, attention_layers.layers)  # type: ignore[arg-type]
        state_dict = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        require_plain_tensors(self, state_dict)  # type: ignore[arg-type]
        repo_id = kwargs.get("repo_id", Path(save_directory).name) if kwargs.get("push_to_hub") else None
        pushed = explain_push_errors(self, repo_id) if repo_id else nullcontext()  # type: ignore[arg-type]
        with auto_map(self), stock_names(self, list(state_dict)), pushed:  # type: ignore[arg-type]
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        if is_main_process:
            self._write_beside_weights(Path(save_directory), attention_layers, repo_id)

    def push_to_hub(self, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, with our card; a failure leaves model and files as they were, and says so."""
        from ..checkpoints.explained_errors import explain_push_errors

        uploads = "transformers.PreTrainedModel._upload_modified_files"
        if look_up(uploads) is None:
            warn_missing(uploads)
        with explain_push_errors(self, repo_id):  # type: ignore[arg-type]
            return super().push_to_hub(repo_id, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `UnsupportedModelError`: every way to continuous batching starts here, before its threads do."""
        raise UnsupportedModelError(
            f"{type(self).__name__} holds synthesized layers, whose logits depend on where a token stands in its own "
            f"sequence; the paged cache of continuous batching (generate_batch) has no place to say so. Call model.generate() "
            f"on padded batches instead."
        )

    def _prepare_generated_length(
        self, generation_config: Any, has_default_max_length: bool, *args: Any, **kwargs: Any
    ) -> Any:
        from ..inference.generation_length import LENGTH_REQUESTED, requests_length

        setattr(generation_config, LENGTH_REQUESTED, requests_length(self, generation_config, has_default_max_length))  # type: ignore
        return super()._prepare_generated_length(generation_config, has_default_max_length, *args, **kwargs)  # type: ignore

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        # The first step of `generate` that knows how many tokens there will be, and which tokens of the prompt are padding.
        from ..inference.generation_length import LENGTH_REQUESTED, require_generation_length

        if generation_config.__dict__.pop(LENGTH_REQUESTED, False):
            require_generation_length(self, model_kwargs, max_cache_length)  # type: ignore[arg-type]
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, mode, batch_size, max_cache_length
        )

    def _write_beside_weights(self, folder: Path, attention_layers: Any, repo_id: str | None = None) -> None:
        """Write the files beside the weights of a checkpoint: the card, the shim, and a tokenizer's new maximum."""
        from ..checkpoints.auto import write_shim
        from ..checkpoints.model_card import write_model_card
        from ..checkpoints.tokenizer_length import shorten_saved
        from ..layers.lengths import max_text_length

        write_shim(folder)
        write_model_card(self, folder, repo_id=repo_id, attention_layers=attention_layers)  # type: ignore[arg-type]
        shorten_saved(folder, max_text_length(attention_layers.layers))
        if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.resolve().name):
            # When Trainer pushes during training, it copies the weights to its output folder, but no files that it does not know.
            write_shim(folder.parent)

    def _upload_modified_files(
        self, working_dir: Any, repo_id: str, files_timestamps: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from ..checkpoints.auto import SHIM
        from ..checkpoints.model_card import FILE
        from ..checkpoints.tokenizer_length import shorten_pushed
        from ..layers.finding.attention_layers import find_attention_layers
        from ..layers.lengths import max_text_length

        attention_layers = find_attention_layers(self)  # type: ignore[arg-type]
        # Transformers has just written a card there, that of the repository or an empty form.
        self._write_beside_weights(Path(working_dir), attention_layers, repo_id)
        hub_arguments = {name: kwargs[name] for name in ("token", "revision") if kwargs.get(name) is not None}
        shorten_pushed(Path(working_dir), max_text_length(attention_layers.layers), repo_id, **hub_arguments)
        ours = (SHIM.name, FILE)
        timestamps = {name: time for name, time in files_timestamps.items() if name not in ours}
        return super()._upload_modified_files(working_dir, repo_id, timestamps, *args, **kwargs)  # type: ignore[misc]


def _has_adapters(model: Any) -> bool:
    """Whether `load_adapter` or `add_adapter` gave the model adapters."""
    try:
        model.active_adapters()
    except (ImportError, ValueError):  # there is no PEFT, or there is no adapter
        return False
    return True
