"""The error for a stock attention class that cannot be synthesized. All of them end with the same advice."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedModelError

OTHER_LAYERS = "atch other layers (layers=…), or register a layer class for this class."


def unsupported(stock: type[nn.Module], reason: str) -> UnsupportedModelError:
    """The error "`stock` `reason`. Patch other layers, or register a layer class"."""
    return UnsupportedModelError(f"{stock.__name__} {reason}. P{OTHER_LAYERS}")


def unsupported_but_dot_product(stock: type[nn.Module], reason: str) -> UnsupportedModelError:
    """The same error for a stock class whose own dot products can be kept (`"dot_product"` as the only variant)."""
    return UnsupportedModelError(f"{stock.__name__} {reason}. Patch it with dot_product alone or p{OTHER_LAYERS}")


def require_no_other_states(other: object) -> None:
    """Raise `UnsupportedModelError` if a layer is given the states of another stack, as cross-attention is."""
    if other is not None:
        raise UnsupportedModelError(
            "A synthesizer replaces self-attention only, but states of an encoder were given (key_value_states or "
            "encoder_hidden_states), which means cross-attention. Leave the cross-attention layer as it is."
        )
