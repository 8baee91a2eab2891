"""Checks that a checkpoint's weights are safetensors files in its own folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from ..errors import CheckpointMismatchError, UnsupportedModelError
from ..synthesizers.stock_weights import is_plain

HUB_ARGUMENTS = ("subfolder", "revision", "cache_dir", "token", "force_download", "local_files_only", "proxies")
"""Arguments of `from_pretrained` for the Hub."""
ADAPTER, PICKLED_ADAPTER = "adapter_model.safetensors", "adapter_model.bin"
"""The files of PEFT. Transformers reads the second one if there is no first one."""


def require_own_files(checkpoint: Any, config: Any = None, variant: str | None = None, **arguments: Any) -> None:
    """Check the names of the files that Transformers is going to read.

    Args:
        checkpoint: a folder, or a repository of the Hub.
        config: the config that the user gave, if any. It may name the file of the weights, as config.json may.
        variant: which variant of the weights.
        **arguments: of `from_pretrained`; those for the Hub are used.

    Raises:
        CheckpointMismatchError: for an index or a config.json that names a pickle, or a file outside the checkpoint.
    """
    if not isinstance(config, PreTrainedConfig):
        config = _content(checkpoint if config is None else config, "config.json", arguments)
        named = config.get("transformers_weights") if isinstance(config, dict) else None
    else:
        named = getattr(config, "transformers_weights", None)
    index = SAFE_WEIGHTS_INDEX_NAME if variant is None else f"model.safetensors.index.{variant}.json"
    if named is not None:
        index = named
        require_own_names([str(named).removesuffix(".index.json")], f"config.json of {str(checkpoint)!r}")
    content = _content(checkpoint, index, arguments) if index.endswith(".json") else None
    if content is not None:
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict):
            raise CheckpointMismatchError(
                f"{index} of {str(checkpoint)!r} has no 'weight_map', which says where each tensor is. Copy or download the "
                f"checkpoint again, or save it again from the model."
            )
        require_own_names(shards.values(), f"{index} of {str(checkpoint)!r}")


def require_own_names(names: Iterable[Any], where: str) -> None:
    """Raise `CheckpointMismatchError` for the name of a file that is no safetensors file in the checkpoint's folder."""
    for name in dict.fromkeys(map(str, names)):
        steps = re.split(r"[/\\]", name)
        if not name.endswith(".safetensors") or ".." in steps or steps[0] == "" or ":" in steps[0]:
            raise CheckpointMismatchError(
                f"{where} names the file {name!r}. Weights are read from safetensors files in the checkpoint's own folder "
                f"alone: a pickle can run code, and another folder is none of the checkpoint's. Don't trust this "
                f"checkpoint; save it again from the model, or download it again from its source."
            )


def require_safe_adapter(adapter: Any, **arguments: Any) -> None:
    """Raise `CheckpointMismatchError` for an adapter of PEFT that has only a pickle."""
    if _find(adapter, ADAPTER, arguments) is None and _find(adapter, PICKLED_ADAPTER, arguments) is not None:
        raise CheckpointMismatchError(
            f"The adapter {str(adapter)!r} is the pickle {PICKLED_ADAPTER}, and pickled weights are never loaded into a "
            f"patched model: they can run code. Save the adapter as {ADAPTER}."
        )


def require_safetensors(checkpoint: Any, use_safetensors: bool | None) -> None:
    """Raise `CheckpointMismatchError` for `use_safetensors=False`, which asks for pickled weights."""
    if use_safetensors is False:
        raise CheckpointMismatchError(
            f"use_safetensors=False was given for {str(checkpoint)!r}, but pickled weights (*.bin) are never loaded into "
            f"a patched model: they can run code. Leave use_safetensors out, and save the weights as safetensors."
        )


def require_plain_tensors(model: PreTrainedModel, state_dict: dict[str, Any]) -> None:
    """Raise `UnsupportedModelError` for weights that were quantized in memory: checkpoints have no format for them."""
    for name, value in state_dict.items():
        if not is_plain(value) and getattr(model, "hf_quantizer", None) is None:
            raise UnsupportedModelError(
                f"{name!r} of this {type(model).__name__} was quantized in memory, and cannot be saved so. Save it before "
                f"it is quantized, load that checkpoint, and quantize again."
            )


def _content(checkpoint: Any, name: str, arguments: dict[str, Any]) -> Any:
    """The content of a JSON file of the checkpoint; None if there is no such file."""
    path = _find(checkpoint, name, arguments)
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise CheckpointMismatchError(
            f"{path} is damaged ({error}). Copy or download the checkpoint again, or save it again from the model."
        ) from error


def _find(checkpoint: Any, name: str, arguments: dict[str, Any]) -> str | None:
    hub_arguments = {key: arguments[key] for key in HUB_ARGUMENTS if arguments.get(key) is not None}
    with suppress(OSError):  # Transformers will raise it too, with more details
        return cached_file(
            checkpoint,
            name,
            **hub_arguments,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return None
