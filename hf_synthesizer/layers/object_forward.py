"""A `forward` that was set on the object of a stock layer: by accelerate's hooks, or by a user.

It is bound to that object. A synthesized layer that took it over would run the stock layer.
"""

from __future__ import annotations

from torch import nn

from ..device.offloading import hooks_of
from ..errors import UnsupportedModelError
from ..upstream.torch_names import ACCELERATE_FORWARD, ACCELERATE_HOOK, COMPILED_CALL


def require_plain_call(stock: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a layer that was compiled, or whose object has another forward than its class."""
    forward = stock.__dict__.get("forward")
    plain = getattr(forward, "__func__", None) is type(stock).forward and getattr(forward, "__self__", None) is stock
    compiled = stock.__dict__.get(COMPILED_CALL) is not None
    if compiled or not (forward is None or plain or hooks_of(stock)):
        problem = "was compiled by itself" if compiled else "has a forward that was set on the object"
        raise UnsupportedModelError(
            f"A layer of {type(stock).__name__} {problem}, which a synthesized layer would not run. Patch the model first, and "
            f"{'compile' if compiled else 'change'} the patched one."
        )


def move_hooks(stock: nn.Module, layer: nn.Module) -> None:
    """Put the accelerate hooks of a stock layer around the forward of the synthesized layer, which has copied its `__dict__`."""
    hooks = hooks_of(stock)
    for name in ("forward", ACCELERATE_FORWARD, ACCELERATE_HOOK):
        layer.__dict__.pop(name, None)
    if hooks:
        from accelerate.hooks import add_hook_to_module

        for hook in hooks:
            add_hook_to_module(layer, hook, append=True)
