"""Hints for users who call `patch_model` with something else than a Transformers model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...upstream.torch_names import COMPILED_MODEL

WRAPPERS = tuple(filter(None, ("module", COMPILED_MODEL, "base_model")))
"""Attributes in which DDP and DataParallel, torch.compile and PEFT keep the wrapped model."""


def suggest_inner_model(thing: Any) -> str:
    """A sentence that says what to patch instead, after a space; empty if nothing is known."""
    if isinstance(thing, type):
        return (
            f" A class has no layers yet: build or load a model first, as in patch_model({thing.__name__}.from_pretrained(…), "
            f"…), or load and patch in one step with from_pretrained_patched()."
        )
    if isinstance(thing, str):
        return f" Load it first, or load and patch in one step: from_pretrained_patched({thing!r}, AutoModel…, …)."
    if isinstance(thing, PreTrainedConfig):
        return " Build a model of it first: patch_model(AutoModel.from_config(config), …)."
    if not isinstance(thing, nn.Module):
        return ""
    wrapped = next((name for name in WRAPPERS if isinstance(getattr(thing, name, None), nn.Module)), None)
    if wrapped is not None:
        return f" It seems to wrap another model: patch that one ({wrapped}) before it is wrapped."
    inner = next((name for name, module in thing.named_modules() if isinstance(module, PreTrainedModel)), None)
    if inner is not None:
        length = " Then set model.max_seq_length to its max_length." if hasattr(thing, "max_seq_length") else ""
        return f" Patch the model in it: patch_model(model{_path(inner)}, …).{length}"
    if type(thing).__module__.startswith("transformers."):
        return (
            " It is a part of a model, and a checkpoint would not know of the patch: patch the model that holds it, and "
            "choose layers by layers=…."
        )
    return ""


def _path(name: str) -> str:
    """The Python expression for a submodule: "0.auto_model" is `[0].auto_model`."""
    return "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in name.split("."))
