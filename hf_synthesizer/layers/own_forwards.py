"""What stands in the way of a layer's forward, set on its object: accelerate's hooks, compiled calls, other people's functions.

accelerate sets `forward` on the object, bound to that object. A twin of a layer that took it over would run the stock layer.
"""

from __future__ import annotations

from torch import nn

from ..device.offloading import hooks_of
from ..errors import UnsupportedModelError
from ..upstream.torch_names import ACCELERATE_FORWARD, ACCELERATE_HOOK, COMPILED_CALL


def require_plain_call(stock: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a layer that computes something else than its class says, or was compiled."""
    own = stock.__dict__.get("forward")
    plain = getattr(own, "__func__", None) is type(stock).forward and getattr(own, "__self__", None) is stock
    compiled = stock.__dict__.get(COMPILED_CALL) is not None
    if compiled or not (own is None or plain or hooks_of(stock)):
        found = "was compiled by itself" if compiled else "has a forward that was set on the object"
        raise UnsupportedModelError(
            f"A layer of {type(stock).__name__} {found}, which a synthesized layer would not run. Patch the model first, and "
            f"{'compile' if compiled else 'change'} the patched one."
        )


def move_hooks(stock: nn.Module, twin: nn.Module) -> None:
    """Give a twin, which has all that its stock layer's object has, accelerate's hooks around a forward of its own."""
    hooks = hooks_of(stock)
    for name in ("forward", ACCELERATE_FORWARD, ACCELERATE_HOOK):
        twin.__dict__.pop(name, None)
    if hooks:
        from accelerate.hooks import add_hook_to_module

        for hook in hooks:
            add_hook_to_module(twin, hook, append=True)
