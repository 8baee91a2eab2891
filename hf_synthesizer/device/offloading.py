"""Weights that are in memory only while their module is called: accelerate's hooks bring them, and take them away again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import SynthesizerError, UnsupportedModelError
from ..upstream.torch_names import ACCELERATE_HOOK


def offloaded(module: nn.Module) -> str | None:
    """The name of the first submodule whose weights are in memory only while it is called, or None; "" is the module itself."""
    for name, part in module.named_modules():
        if any(getattr(hook, "offload", False) for hook in hooks_of(part)) or _looks_offloaded(part):
            return name
    return None


def require_in_memory(module: nn.Module, what: str, error: type[SynthesizerError] = UnsupportedModelError) -> None:
    """Raise an error for a module whose weights were offloaded.

    Args:
        module: a model, or a layer.
        what: what was asked for, as in "A model cannot be patched"; it needs the weights.
        error: the class of the error.
    """
    name = offloaded(module)
    if name is not None:
        owner = repr(name) if name else type(module).__name__
        raise error(
            f"{what}: the weights of {owner} are offloaded, and in memory only while the layer is called. Do this before "
            f"it is offloaded, or load the model whole (device_map={{'': 'cpu'}}); a patched model that was saved may be "
            f"loaded with any device_map."
        )


def hooks_of(module: nn.Module) -> list[Any]:
    """accelerate's hooks on a module, in their order."""
    hook = module.__dict__.get(ACCELERATE_HOOK)
    return [] if hook is None else list(_flat(hook))


def _looks_offloaded(module: nn.Module) -> bool:
    """The stand-in for hooks that we cannot find: a forward that was set on the object, and a weight on the meta device."""
    if ACCELERATE_HOOK is not None or "forward" not in module.__dict__:
        return False
    return any(parameter.is_meta for parameter in module.parameters(recurse=False))


def _flat(hook: Any) -> Iterator[Any]:
    """A hook, or those that it is a sequence of."""
    if hasattr(hook, "hooks"):
        for part in hook.hooks:
            yield from _flat(part)
    else:
        yield hook
