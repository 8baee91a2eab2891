"""Which layer class serves a stock attention class, and the synthesized class of both."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...errors import InvalidConfigError
from ...synthesizers.config import HeadGroupsConfig, LayerConfig
from ...synthesizers.stock_weights import is_quantized
from ..refusals import unsupported
from .even_attention import equals_stock
from .projections import find_projection_names, head_dim, names_of_projections, query_heads, value_heads
from .stock_classes import CLASSES, name_of_attention
from .stock_code import names_used, uses_attention_interface

if TYPE_CHECKING:
    from ..mixin import SynthesizerMixin

LAYER_CLASSES: list[type[SynthesizerMixin]] = []
"""The registered layer classes, the last registered first. The layer that keeps the stock forward is not among them."""

_CLASSES: dict[tuple[type[nn.Module], bool], type[SynthesizerMixin]] = {}

UNDERSTOOD = frozenset(
    name
    for names in (
        "ALL_ATTENTION_FUNCTIONS get_interface eager_attention_forward _attn_implementation config training layer_idx",
        "shape size view reshape transpose contiguous unsqueeze dtype to float torch cat bool isinstance ValueError getattr get",
        "head_dim attention_head_size num_heads num_attention_heads num_key_value_heads embed_dim all_head_size",
        "key_value_proj_dim attention_dropout dropout dropout_p dropout_prob p scaling scale attn_logit_softcapping",
        "is_causal sliding_window is_sliding layer_type use_sliding_window",
        "apply_rotary_pos_emb rotary_ndims rotary_emb use_rope position_embedding_type",
        "q_norm k_norm qk_norm use_qk_norm qk_layernorm q_layernorm k_layernorm query_layernorm key_layernorm",
        "EncoderDecoderCache update is_updated self_attention_cache cross_attention_cache layers keys values",
    )
    for name in names.split()
)
"""Names that a stock forward may use if a layer class is to replace it, beside the names of projections (`projections.py`).

These are shapes and caches, which all layer classes handle, and names that concern queries and keys alone: norms, rotation,
scales. Any other name (a gate, a sink, a norm of the values) could change the output. Then the layer keeps the stock forward,
unless the layer class `knows` the name.
"""
COUNTS = frozenset(
    ["num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "embed_dim", "all_head_size"]
)
"""Names by which a stock forward may rely on having all heads."""
SPLITS = frozenset(["split", "split_size", "hidden_size"])
"""Names by which a stock forward may split a fused projection at fixed places."""
NORMS = frozenset([name for name in UNDERSTOOD if "norm" in name])
"""Names of norms of queries and keys."""


def register_layer(layer_class: type[SynthesizerMixin]) -> type[SynthesizerMixin]:
    """Make a layer class known: a subclass of `SynthesizerMixin` whose `forward` has the parameters of a stock forward.

    It then serves every attention class with these parameters whose forward uses no name beyond those of projections,
    `UNDERSTOOD` and `layer_class.knows`. The last registered class comes first. Use it as a decorator, or call it.

    Raises:
        InvalidConfigError: for a layer class without a `forward` of its own.
    """
    if "forward" not in layer_class.__dict__:
        raise InvalidConfigError(
            f"{layer_class.__name__} must define forward(), with the parameters of the stock forward."
        )
    LAYER_CLASSES.insert(0, layer_class)
    return layer_class


def find_layer_class(stock: type[nn.Module]) -> type[SynthesizerMixin] | None:
    """The layer class that may replace the forward of a stock attention class; None if only the stock forward is right for sure."""
    fitting = [layer_class for layer_class in _with_same_parameters(stock) if not _unknown_names(stock, layer_class)]
    return min(fitting, key=lambda layer_class: len(layer_class.knows), default=None)  # the plainest


def fitting_layer_class(stock: type[nn.Module]) -> type[SynthesizerMixin] | None:
    """The layer class with the stock parameters that knows most names of the stock forward, even if it does not know all.

    Only for checkpoints that say that a layer class served the layer: a new name in the stock forward of another Transformers
    changes nothing in the checkpoint.
    """
    return min(
        _with_same_parameters(stock),
        key=lambda layer_class: (len(_unknown_names(stock, layer_class)), len(layer_class.knows)),
        default=None,
    )


def _with_same_parameters(stock: type[nn.Module]) -> list[type[SynthesizerMixin]]:
    parameters = _parameters(stock)
    return [layer_class for layer_class in LAYER_CLASSES if _parameters(layer_class) == parameters]


def _unknown_names(stock: type[nn.Module], layer_class: type[SynthesizerMixin]) -> frozenset[str]:
    return names_used(stock) - UNDERSTOOD - names_of_projections() - layer_class.knows


def takes_fewer_heads(module: nn.Module) -> bool:
    """Whether the stock forward of an attention module works if its projections make the queries and keys of some heads alone.

    It does if it computes the number of heads from their width, and if norms, where there are any, belong to single heads. One
    projection of queries, keys and values then makes fewer values as well.
    """
    projection_names = find_projection_names(module)
    names = names_used(stock_class_of(module))
    if projection_names is None or not is_understood(module) or names & COUNTS:
        return False
    if projection_names.fused and (names & SPLITS or value_heads(module) != query_heads(module)):
        return False
    if any(is_quantized(cast(nn.Module, module._modules[name])) for name in projection_names.replaced):
        return False
    norms = [norm for name, norm in module._modules.items() if name in NORMS and norm is not None]
    weights = [getattr(norm, "weight", None) for norm in norms]
    return all(weight is not None and weight.shape == (head_dim(module),) for weight in weights)


def synthesizer_class(
    stock: type[nn.Module], *, keeps_stock_forward: bool = False, as_saved: bool = False
) -> type[SynthesizerMixin]:
    """The synthesized subclass of a stock attention class: with the forward of its layer class, or with the stock forward.

    The first call makes it. It can be imported from `hf_synthesizer.models` by its name.

    Args:
        stock: the stock attention class.
        keeps_stock_forward: whether to keep the stock forward even if there is a layer class.
        as_saved: whether any fitting layer class will do (`fitting_layer_class`), because it served a checkpoint.
    """
    from ..stock_forward import StockForwardLayer

    understood = find_layer_class(stock)
    layer_class = fitting_layer_class(stock) if as_saved and understood is None else understood
    keeps_stock_forward = keeps_stock_forward or layer_class is None
    if (stock, keeps_stock_forward) in _CLASSES:
        return _CLASSES[stock, keeps_stock_forward]
    bases: tuple[type, ...]
    if layer_class is None:
        bases = (StockForwardLayer, stock)
    elif keeps_stock_forward:
        bases = (StockForwardLayer, synthesizer_class(stock))
    else:
        bases = (layer_class, stock)
    cls = type(
        name_of_attention(stock)
        + ("WithStockForward" if keeps_stock_forward and layer_class is not None else "")
        + ("AsSaved" if layer_class is not understood else ""),
        bases,
        {
            "__module__": CLASSES,
            "__doc__": f"`{stock.__name__}` with synthesized logits.",
            "stock_class": stock,
            **(_stock_forward_members(stock) if keeps_stock_forward else {}),
        },
    )
    _CLASSES[stock, keeps_stock_forward] = cls
    return cls


def serving_class(cls: type[SynthesizerMixin], config: LayerConfig, layer: nn.Module) -> type[SynthesizerMixin]:
    """The class for this configuration of a stock layer: `cls`, or the one that keeps the stock forward.

    The stock forward is kept if it has to compute the dot products, or computes anything that the layer class does not.

    Raises:
        UnsupportedModelError: if it computes more, but does not use the attention interface, so that it cannot be kept.
    """
    from ..stock_forward import StockForwardLayer

    if issubclass(cls, StockForwardLayer):
        return cls
    stock = cls.stock_class
    equal, replaceable = equals_stock(cls, layer), uses_attention_interface(stock)
    if equal is False and not replaceable:
        raise unsupported(
            stock,
            f"computes more than {cls.__name__} does: their outputs differ where all logits are 0. Nor does it use "
            f"Transformers' attention interface, so that its own forward cannot be kept",
        )
    by_layer_class = (
        "dot_product" not in config.parts
        or cls.serves_dot_product
        or (cls.compares_some_heads and isinstance(config, HeadGroupsConfig))
    )
    if by_layer_class and (equal or not replaceable):
        return cls
    return synthesizer_class(stock, keeps_stock_forward=True)


def is_understood(layer: nn.Module) -> bool:
    """Whether a layer class may replace the stock forward of an attention layer, by its names and by its numbers."""
    stock = stock_class_of(layer)
    return find_layer_class(stock) is not None and bool(equals_stock(synthesizer_class(stock), layer))


def stock_class_of(layer: nn.Module) -> type[nn.Module]:
    """The stock class of an attention layer, synthesized or not."""
    return getattr(layer, "stock_class", type(layer))


def _stock_forward_members(stock: type[nn.Module]) -> dict[str, Any]:
    """A forward with the stock signature that calls the stock forward, and the names of its parameters."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_stock(*args, **kwargs)

    forward.__signature__ = inspect.signature(stock.forward)  # type: ignore[attr-defined]
    return {"forward": forward, "stock_parameters": _parameters(stock)[1:]}


def _parameters(cls: type[nn.Module]) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)
