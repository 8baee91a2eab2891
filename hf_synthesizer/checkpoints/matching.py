"""What a checkpoint of a patched model holds beyond a stock one, and how it is held to its word when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from ..errors import CheckpointMismatchError, UnsupportedModelError
from ..layers.mixin import SynthesizerMixin
from ..synthesizers.stock_weights import is_plain

ALIGNMENT = 64
"""Bytes: where torch's own allocations start. Some kernels round differently on memory that starts elsewhere."""
OTHERWISE = (
    "If its config.json has no 'served_by', another transformers may have served the layer otherwise: load it with that one "
    "(transformers_version) and save it again."
)
"""The way out of what checkpoints of before `served_by` cannot say."""


def synthesized_layers(model: nn.Module) -> Iterator[tuple[str, SynthesizerMixin]]:
    """The patched layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SynthesizerMixin))


def require_plain_tensors(model: PreTrainedModel, state_dict: dict[str, Any]) -> None:
    """Raise `UnsupportedModelError` for weights that were quantized in memory, for which checkpoints have no format."""
    for name, value in state_dict.items():
        if not is_plain(value) and getattr(model, "hf_quantizer", None) is None:
            raise UnsupportedModelError(
                f"{name!r} of this {type(model).__name__} was quantized in memory, and cannot be saved so. Save it before "
                f"it is quantized, load that checkpoint, and quantize again."
            )


@contextmanager
def reading(checkpoint: Any, **hub_arguments: Any) -> Iterator[None]:
    """Name the file when safetensors finds it damaged, and the checkpoint when it does not fit.

    Raises:
        CheckpointMismatchError: in place of `SafetensorError`, and of one that does not know where it comes from.
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointMismatchError(
            f"{_damaged_file(checkpoint, hub_arguments)} is truncated or damaged ({error}). Copy or download it again "
            f"(from_pretrained(..., force_download=True)), or save it again from the model."
        ) from error
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"The checkpoint {str(checkpoint)!r} does not fit: {error}") from error


@contextmanager
def pushing(model: nn.Module, repo_id: str) -> Iterator[None]:
    """Add to an error of the hub library what became of the model."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"Pushing this {type(model).__name__} to {repo_id!r} failed. The model in memory is as it was, and what "
            f"save_pretrained() wrote is whole. Push again once the cause is gone (offline: check the connection; 401 "
            f"or 403: log in with `hf auth login` and a token that may write): what has arrived is not sent twice."
        )
        raise


def _damaged_file(checkpoint: Any, hub_arguments: dict[str, Any]) -> str:
    folder = Path(str(checkpoint)) / (hub_arguments.get("subfolder") or "")
    if not folder.is_dir():
        with suppress(OSError):
            found = cached_file(checkpoint, SAFE_WEIGHTS_NAME, **{**hub_arguments, "local_files_only": True})
            return f"The file {found}"
        return f"A safetensors file of {checkpoint!r}"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return f"The file {path}"
    return f"A safetensors file in {folder}"


def require_match(model: PreTrainedModel, info: dict[str, Any], checkpoint: Any, ignore_mismatched: bool) -> None:
    """Compare what was loaded with what `config.json` promises.

    Raises:
        CheckpointMismatchError: for a tensor of a patched layer that is missing, has another shape or was not asked
            for, and for any other tensor of another shape unless `ignore_mismatched`.
    """
    patched = tuple(f"{name}." for name, _ in synthesized_layers(model))
    missing = sorted(key for key in info["missing_keys"] if key.startswith(patched))
    if missing:
        raise CheckpointMismatchError(
            f"The checkpoint {str(checkpoint)!r} lacks {len(missing)} tensors of its synthesized layers, among them "
            f"{missing[0]!r}; its config.json promises them. If it is a stock checkpoint, load it with the stock class "
            f"and patch it with patch_model(), or use from_pretrained_patched(); else save it again from the model. {OTHERWISE}"
        )
    present = tuple(dict(model.named_modules()))
    for key in sorted(info["unexpected_keys"]):
        layer, separator, _ = key.partition(".synthesizer.")
        # The tensors of a stack that this head does without are no contradiction.
        if key.startswith(patched) or separator and any(n == layer or n.endswith(f".{layer}") for n in present):
            raise CheckpointMismatchError(
                f"The checkpoint {str(checkpoint)!r} holds the tensor {key!r}, for which the field 'synthesizer' of its "
                f"config.json has no place. Repair that field, or save the checkpoint again from the model. {OTHERWISE}"
            )
    for key, found, expected in sorted(info["mismatched_keys"]):
        ours = ".synthesizer." in key or key.startswith(patched)
        if ours or not ignore_mismatched:
            remedy = (
                "Repair the field 'synthesizer' of config.json (max_length, rank, factors and share_heads decide the "
                f"shape), or save the checkpoint again from the model. {OTHERWISE}"
                if ours
                else "Repair config.json, or pass ignore_mismatched_sizes=True to start this tensor afresh."
            )
            raise CheckpointMismatchError(
                f"In the checkpoint {str(checkpoint)!r} the tensor {key!r} has the shape {tuple(found)}, but its "
                f"config.json asks for {tuple(expected)}. {remedy}"
            )


def require_safetensors(checkpoint: Any, use_safetensors: bool | None) -> None:
    """Raise `CheckpointMismatchError` when somebody asks for pickled weights."""
    if use_safetensors is False:
        raise CheckpointMismatchError(
            f"use_safetensors=False was given for {str(checkpoint)!r}, but pickled weights (*.bin) are never loaded into "
            f"a patched model: they can run code. Leave use_safetensors out, and save the weights as safetensors."
        )


def unify_precision(model: nn.Module) -> None:
    """Give each synthesizer the precision of the rest of its layer, in place.

    Transformers keeps modules in float32 whose names hold certain letters, in T5 "wo": it means others than ours.
    """
    for _, layer in synthesized_layers(model):
        own = {id(parameter) for parameter in layer.synthesizer.parameters()}
        stock = [p for p in layer.parameters() if id(p) not in own and p.dim() > 1 and is_plain(p)]
        dtype = next((p.dtype for p in stock if p.is_floating_point()), None)
        for tensor in (*layer.synthesizer.parameters(), *layer.synthesizer.buffers()):
            if dtype is not None and is_plain(tensor) and tensor.is_floating_point() and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def align(model: nn.Module) -> None:
    """Move tensors that lie at an odd place of a mapped file into memory of their own, in place.

    Without this a loaded model could differ from the saved one in the last bit of some outputs.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        plain = type(tensor) in (nn.Parameter, torch.Tensor)
        if plain and tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
