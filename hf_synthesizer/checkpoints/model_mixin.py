"""Patched models as Transformers sees them: own model and config classes, so that a checkpoint cannot be mistaken."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import UnsupportedModelError
from ..faces.mixin import SINCE_THEN, SynthesizerMixin
from ..synthesizers.mixture import MixtureSynthesizer
from .guard import Guard


class SynthesizerModelMixin:
    """Mixed into each stock model class: builds the patched layers that `config.synthesizer` describes, and keeps
    checkpoints honest in both directions.
    """

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        from ..patching.swap import rebuild

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        rebuild(self)  # type: ignore[arg-type]
        missing = self._keys_to_ignore_on_load_missing or ()  # type: ignore[has-type]
        self._keys_to_ignore_on_load_missing = {*missing, re.escape(SINCE_THEN) + "$"}

    def _init_weights(self, module: nn.Module) -> None:
        # The stock initialisation of an attention module expects its query and key; ours are initialised when built. But
        # where the module has buffers that no checkpoint holds, nobody else fills them in (GPT-Neo's windows).
        if isinstance(module, MixtureSynthesizer) and hasattr(module, "mixing_change"):
            nn.init.zeros_(module.mixing_change)  # all that an old checkpoint may do without
        if not isinstance(module, SynthesizerMixin) or module._non_persistent_buffers_set:
            super()._init_weights(module)  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Transformers' last visit to each module of a model that it has filled, or of a part of a composite model. It leaves
        # modules of custom code alone once their parameters are there, and with them the buffers that no checkpoint holds
        # and that a model fills in (Falcon H1). Ours is not custom code in that sense.
        if not isinstance(module, Guard):
            super()._initialize_weights(module)  # type: ignore[misc]
        elif getattr(module.weight, "_is_hf_initialized", False):
            names = (name for name, guard in self.named_modules() if guard is module)  # type: ignore[attr-defined]
            module.require(repr(next(names).rpartition(".")[0]))
        else:
            module.renew()  # not in the checkpoint: whatever was in memory

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: every checkpoint carries the shim already, and needs no copy of this module."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, but strict: the patched layers are exactly what config.json promises.

        Raises:
            CheckpointMismatchError: when a tensor of a patched layer is missing, has another shape, was not asked for,
                or belongs to another patch; when a file is damaged; when a description is newer than this version or unknown to it.
        """
        from .matching import align, reading, require_match, require_safetensors, unify_precision

        name = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched = kwargs.pop("ignore_mismatched_sizes", False)
        require_safetensors(name, kwargs.pop("use_safetensors", None))
        hub_arguments = {key: kwargs[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in kwargs}
        with reading(name, **hub_arguments):
            model, info = super().from_pretrained(  # type: ignore[misc]
                name,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `require_match` looks at them, and says which
                use_safetensors=True,
                **kwargs,
            )
        require_match(model, info, name, ignore_mismatched)
        unify_precision(model)
        align(model)
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """As Transformers' own; with the shim for `trust_remote_code`, and a card."""
        from .auto import auto_map
        from .matching import pushing, require_own_tensors, require_plain_tensors

        if getattr(self, "_hf_peft_config_loaded", False):  # an adapter is saved then, and not this model
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
            return
        state_dict = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        require_plain_tensors(self, state_dict)  # type: ignore[arg-type]
        require_own_tensors(self)  # type: ignore[arg-type]
        repo_id = kwargs.get("repo_id", Path(save_directory).name) if kwargs.get("push_to_hub") else None
        with auto_map(self), pushing(self, repo_id) if repo_id else nullcontext():  # type: ignore[arg-type]
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        if is_main_process:
            self._complete(Path(save_directory), repo_id)

    def push_to_hub(self, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own, with our card; a failure leaves model and files as they were, and says so."""
        from .matching import pushing

        with pushing(self, repo_id):  # type: ignore[arg-type]
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
        from ..inference.room import NAMED, names_length

        setattr(generation_config, NAMED, names_length(self, generation_config, has_default_max_length))  # type: ignore
        return super()._prepare_generated_length(generation_config, has_default_max_length, *args, **kwargs)  # type: ignore

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        # The first place of `generate` that knows both how many tokens there will be and which of the prompt are padding.
        from ..inference.room import NAMED, require_room

        if generation_config.__dict__.pop(NAMED, False):
            require_room(self, model_kwargs, max_cache_length)  # type: ignore[arg-type]
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, mode, batch_size, max_cache_length
        )

    def _complete(self, folder: Path, repo_id: str | None = None) -> None:
        """Add to a saved checkpoint what lies beside its weights: the card, the shim, and a tokenizer's new maximum."""
        from .auto import write_shim
        from .model_card import write_model_card
        from .tokenizer_length import shorten_saved

        write_shim(folder)
        write_model_card(self, folder, repo_id=repo_id)  # type: ignore[arg-type]
        shorten_saved(folder, self)  # type: ignore[arg-type]
        if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.resolve().name):
            # Trainer's pushes during training copy the weights up to its output folder, by names that it knows.
            write_shim(folder.parent)

    def _upload_modified_files(
        self, working_dir: Any, repo_id: str, files_timestamps: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from .auto import SHIM
        from .model_card import FILE
        from .tokenizer_length import shorten_pushed

        # Transformers has just put a card there, the repo's or an empty form.
        self._complete(Path(working_dir), repo_id)
        hub_arguments = {name: kwargs[name] for name in ("token", "revision") if kwargs.get(name) is not None}
        shorten_pushed(Path(working_dir), self, repo_id, **hub_arguments)  # type: ignore[arg-type]
        ours = (SHIM.name, FILE)
        timestamps = {name: time for name, time in files_timestamps.items() if name not in ours}
        return super()._upload_modified_files(working_dir, repo_id, timestamps, *args, **kwargs)  # type: ignore[misc]


def patched_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The `SynthesizerXxx` class of a patched model; its own class may be a subclass that a wrapper made (FSDP2)."""
    return next(cls for cls in type(model).__mro__ if SynthesizerModelMixin in cls.__bases__)


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that a patched model had before."""
    return patched_class(model).__bases__[1]
