"""Which layer class serves a stock attention class, and the synthesized class that comes of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...errors import InvalidConfigError, UnsupportedModelError
from ...synthesizers.config import HeadGroupsConfig, LayerConfig
from ...synthesizers.stock_weights import is_quantized
from .even_attention import equals_stock
from .projections import find_projection_names, head_dim, query_heads, value_heads
from .stock_classes import CLASSES, name_of_attention
from .stock_code import names_used, uses_attention_interface

if TYPE_CHECKING:
    from ..mixin import SynthesizerMixin

LAYER_CLASSES: list[type[SynthesizerMixin]] = []
"""The registered layer classes, in the order in which they are asked; the layer that keeps the stock forward stands apart."""

_CLASSES: dict[tuple[type[nn.Module], bool], type[SynthesizerMixin]] = {}

UNDERSTOOD = frozenset(
    [
        "ALL_ATTENTION_FUNCTIONS",
        "get_interface",
        "eager_attention_forward",
        "_attn_implementation",
        "config",
        "training",
        "layer_idx",
        "update",
        "shape",
        "size",
        "view",
        "reshape",
        "transpose",
        "contiguous",
        "unsqueeze",
        "dtype",
        "to",
        "float",
        "torch",
        "cat",
        "bool",
        "isinstance",
        "ValueError",
        "getattr",
        "get",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "out_proj",
        "dense",
        "projection_layer",
        "query",
        "key",
        "value",
        "q_lin",
        "k_lin",
        "v_lin",
        "out_lin",
        "q",
        "k",
        "v",
        "o",
        "head_dim",
        "attention_head_size",
        "num_heads",
        "num_attention_heads",
        "num_key_value_heads",
        "embed_dim",
        "all_head_size",
        "key_value_proj_dim",
        "attention_dropout",
        "dropout",
        "dropout_p",
        "dropout_prob",
        "p",
        "scaling",
        "scale",
        "is_causal",
        "sliding_window",
        "is_sliding",
        "layer_type",
        "use_sliding_window",
        "attn_logit_softcapping",
        "apply_rotary_pos_emb",
        "rotary_ndims",
        "rotary_emb",
        "use_rope",
        "position_embedding_type",
        "q_norm",
        "k_norm",
        "qk_norm",
        "use_qk_norm",
        "qk_layernorm",
        "q_layernorm",
        "k_layernorm",
        "query_layernorm",
        "key_layernorm",
        "EncoderDecoderCache",
        "is_updated",
        "self_attention_cache",
        "cross_attention_cache",
        "layers",
        "keys",
        "values",
    ]
)
"""The names that the forward of a stock attention class may use, for a layer class to stand in for it.

They are the projections, shapes and caches that all layer classes know, and what happens to queries and keys alone: norms,
rotation, scales. Whatever else a forward uses (a gate, a sink, a norm of the values) could change what comes out, and is
left to the stock code (`stock_forward.py`), unless the layer class says that it `knows` it.
"""


def register_layer(layer_class: type[SynthesizerMixin]) -> type[SynthesizerMixin]:
    """Make a layer class known: a subclass of `SynthesizerMixin` whose `forward` has the parameters of a stock forward.

    It then serves every attention class with these parameters whose forward uses no name beyond `UNDERSTOOD` and
    `layer_class.knows`. The last one registered is asked first. As a decorator, or called.

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
    """The layer class that may stand in for a stock attention class; None where only its own forward is known to be right."""
    names, used = _parameters(stock), names_used(stock)
    fitting = [
        layer_class
        for layer_class in LAYER_CLASSES
        if _parameters(layer_class) == names and used <= UNDERSTOOD | layer_class.knows
    ]
    return min(fitting, key=lambda layer_class: len(layer_class.knows), default=None)  # the plainest


def fitting_layer_class(stock: type[nn.Module]) -> type[SynthesizerMixin] | None:
    """The layer class whose forward has the stock parameters, whatever names the stock forward uses: the one that answers most of them.

    For checkpoints alone, which say that the layer was served so: a new name in the stock forward changes nothing of what they hold.
    """
    names, used = _parameters(stock), names_used(stock)
    fitting = [layer_class for layer_class in LAYER_CLASSES if _parameters(layer_class) == names]
    return min(
        fitting,
        key=lambda layer_class: (len(used - UNDERSTOOD - layer_class.knows), len(layer_class.knows)),
        default=None,
    )


COUNTS = frozenset(
    ["num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "embed_dim", "all_head_size"]
)
"""Names by which a stock forward may count on having all heads."""
PLACES = frozenset(["split", "split_size", "hidden_size"])
"""Names by which a stock forward may take a fused projection apart at places that it knows beforehand."""
NORMS = frozenset([name for name in UNDERSTOOD if "norm" in name])
"""What models call norms of queries and keys."""


def takes_fewer_heads(module: nn.Module) -> bool:
    """Whether the stock forward of an attention module may be given projections that make some heads' queries and keys alone.

    That is where it finds the number of heads by their width, and norms, if there are any, are a head's own. One projection of
    queries, keys and values makes fewer values as well then.
    """
    projection_names = find_projection_names(module)
    stock = getattr(module, "stock_class", type(module))
    if projection_names is None or not is_understood(module) or names_used(stock) & COUNTS:
        return False
    if projection_names.fused and (names_used(stock) & PLACES or value_heads(module) != query_heads(module)):
        return False
    if any(is_quantized(cast(nn.Module, module._modules[name])) for name in projection_names.replaced):
        return False
    norms = [norm for name, norm in module._modules.items() if name in NORMS and norm is not None]
    weights = [getattr(norm, "weight", None) for norm in norms]
    return all(weight is not None and weight.shape == (head_dim(module),) for weight in weights)


def synthesizer_class(
    stock: type[nn.Module], *, keeps_stock_forward: bool = False, as_saved: bool = False
) -> type[SynthesizerMixin]:
    """The synthesized subclass of a stock attention class: by its layer class, or in its stock forward in the stock forward.

    Made at its first use, and importable from `hf_synthesizer.models` by its name. With `as_saved` a layer class serves wherever one
    fits (`fitting_layer_class`), because a checkpoint was served so.
    """
    from ..stock_forward.layer import StockForwardLayer

    found = find_layer_class(stock)
    layer_class = fitting_layer_class(stock) if as_saved and found is None else found
    keeps_stock_forward = keeps_stock_forward or layer_class is None
    made = _CLASSES.get((stock, keeps_stock_forward))
    if made is None:
        bases: tuple[type, ...]
        if not keeps_stock_forward:
            bases = (layer_class, stock)  # type: ignore[assignment]
        elif layer_class is None:
            bases = (StockForwardLayer, stock)
        else:
            bases = (StockForwardLayer, synthesizer_class(stock))
        made = type(
            name_of_attention(stock)
            + ("WithStockForward" if keeps_stock_forward and layer_class is not None else "")
            + ("AsSaved" if layer_class is not found else ""),
            bases,
            {
                "__module__": CLASSES,
                "__doc__": f"`{stock.__name__}` with synthesized logits.",
                "stock_class": stock,
                **(_stock_forward_members(stock) if keeps_stock_forward else {}),
            },
        )
        _CLASSES[stock, keeps_stock_forward] = made
    return made


def serving_class(cls: type[SynthesizerMixin], config: LayerConfig, layer: nn.Module) -> type[SynthesizerMixin]:
    """The class for this configuration of a stock layer: the one that keeps the stock forward where that one has to make the
    dot products, or computes anything that our own forward does not.

    Raises:
        UnsupportedModelError: where it does, and there is no attention interface through which it could be kept.
    """
    from ..stock_forward.layer import StockForwardLayer

    if issubclass(cls, StockForwardLayer):
        return cls
    keeping = synthesizer_class(cls.stock_class, keeps_stock_forward=True)
    equal, replaceable = equals_stock(cls, layer), uses_attention_interface(cls.stock_class)
    if equal is False and not replaceable:
        raise UnsupportedModelError(
            f"{cls.stock_class.__name__} computes more than {cls.__name__} does: their outputs differ where all logits are 0. Nor "
            f"does it use Transformers' attention interface, so that its own forward cannot be kept. Patch other layers "
            f"(layers=…), or register a layer class for this class."
        )
    if not equal and replaceable:
        return keeping
    if "dot_product" not in config.parts or cls.serves_dot_product:
        return cls
    if cls.compares_some_heads and isinstance(config, HeadGroupsConfig):
        return cls
    return keeping


def is_understood(layer: nn.Module) -> bool:
    """Whether names and numbers say what the stock forward of an attention layer does."""
    stock = getattr(layer, "stock_class", type(layer))
    return find_layer_class(stock) is not None and bool(equals_stock(synthesizer_class(stock), layer))


def _stock_forward_members(stock: type[nn.Module]) -> dict[str, Any]:
    """What a layer that keeps the stock forward has of its own: a forward with the signature of the stock one, which it calls."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_stock(*args, **kwargs)

    forward.__signature__ = inspect.signature(stock.forward)  # type: ignore[attr-defined]
    return {"forward": forward, "stock_parameters": _parameters(stock)[1:]}


def _parameters(cls: type[nn.Module]) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)
