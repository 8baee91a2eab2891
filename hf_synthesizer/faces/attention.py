"""Which face serves a stock attention class, and the synthesized class that comes of it."""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..config import HeadGroupsConfig, LayerConfig
from ..errors import InvalidConfigError
from ..synthesizers.stock_weights import is_quantized
from .wiring import find_wiring, head_dim, query_heads, value_heads

if TYPE_CHECKING:
    from .mixin import SynthesizerMixin

FACES: list[type[SynthesizerMixin]] = []
"""The registered faces, in the order in which they are asked; the guest stands apart."""

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
"""The names that the forward of a stock attention class may use, for a face to stand in for it.

They are the projections, shapes and caches that all faces know, and what happens to queries and keys alone: norms,
rotation, scales. Whatever else a forward uses (a gate, a sink, a norm of the values) could change what comes out, and is
left to the stock code (`guest.py`), unless the face says that it `knows` it.
"""


def register_face(face: type[SynthesizerMixin]) -> type[SynthesizerMixin]:
    """Make a face known: a subclass of `SynthesizerMixin` whose `forward` has the parameters of a stock forward.

    It then serves every attention class with these parameters whose forward uses no name beyond `UNDERSTOOD` and
    `face.knows`. The last one registered is asked first. As a decorator, or called.

    Raises:
        InvalidConfigError: for a face without a `forward` of its own.
    """
    if "forward" not in face.__dict__:
        raise InvalidConfigError(f"{face.__name__} must define forward(), with the parameters of the stock forward.")
    FACES.insert(0, face)
    return face


def find_face(stock: type[nn.Module]) -> type[SynthesizerMixin] | None:
    """The face that may stand in for a stock attention class; None where only its own forward is known to be right."""
    names, used = _parameters(stock), _names_used(stock)
    fitting = [face for face in FACES if _parameters(face) == names and used <= UNDERSTOOD | face.knows]
    return min(fitting, key=lambda face: len(face.knows), default=None)  # the plainest


def uses_attention_interface(stock: type[nn.Module]) -> bool:
    """Whether a class hands queries, keys and values to Transformers' attention interface."""
    forward = stock.__dict__.get("forward") or getattr(stock, "forward", None)
    return "ALL_ATTENTION_FUNCTIONS" in _names_used(stock) if forward is not None else False


def asks_for_backend(stock: type[nn.Module]) -> bool:
    """Whether a forward does something by the name of the attention backend, beside asking for its function.

    Under ours it would do something else. (Sparse attention that an indexer chooses is masked so.)
    """
    code = inspect.unwrap(stock.forward)
    read = [instruction.argval for instruction in dis.get_instructions(code)]
    return read.count("_attn_implementation") > read.count("get_interface")


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
    wiring = find_wiring(module)
    stock = getattr(module, "stock_class", type(module))
    if wiring is None or find_face(stock) is None or _names_used(stock) & COUNTS:
        return False
    if wiring.fused and (_names_used(stock) & PLACES or value_heads(module) != query_heads(module)):
        return False
    if any(is_quantized(cast(nn.Module, module._modules[name])) for name in wiring.replaced):
        return False
    norms = [norm for name, norm in module._modules.items() if name in NORMS and norm is not None]
    weights = [getattr(norm, "weight", None) for norm in norms]
    return all(weight is not None and weight.shape == (head_dim(module),) for weight in weights)


def synthesizer_class(stock: type[nn.Module], *, guest: bool = False) -> type[SynthesizerMixin]:
    """The synthesized subclass of a stock attention class: by its face, or as a guest in the stock forward.

    Made at its first use, and importable from `hf_synthesizer.models` by its name.
    """
    from .guest import GuestFace

    face = find_face(stock)
    guest = guest or face is None
    made = _CLASSES.get((stock, guest))
    if made is None:
        from ..models import name_of_attention

        bases: tuple[type, ...]
        if not guest:
            bases = (face, stock)  # type: ignore[assignment]
        elif face is None:
            bases = (GuestFace, stock)
        else:
            bases = (GuestFace, synthesizer_class(stock))
        made = type(
            name_of_attention(stock) + ("AsGuest" if guest and face is not None else ""),
            bases,
            {
                "__module__": "hf_synthesizer.models",
                "__doc__": f"`{stock.__name__}` with synthesized logits.",
                "stock_class": stock,
                **(_guest_members(stock) if guest else {}),
            },
        )
        _CLASSES[stock, guest] = made
    return made


def serving_class(cls: type[SynthesizerMixin], config: LayerConfig) -> type[SynthesizerMixin]:
    """The class for this configuration: as a guest where the stock forward has to make the dot products."""
    if "dot_product" not in config.parts or cls.serves_dot_product:
        return cls
    if cls.compares_some_heads and isinstance(config, HeadGroupsConfig):
        return cls
    return synthesizer_class(cls.stock_class, guest=True)


def _guest_members(stock: type[nn.Module]) -> dict[str, Any]:
    """What a guest has of its own: a forward with the signature of the stock one, which it calls."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_stock(*args, **kwargs)

    forward.__signature__ = inspect.signature(stock.forward)  # type: ignore[attr-defined]
    return {"forward": forward, "stock_parameters": _parameters(stock)[1:]}


def _parameters(cls: type[nn.Module]) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)


def _names_used(cls: type[nn.Module]) -> set[str]:
    """All names, global or of an attribute, in the code of a class's forward."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return set() if code is None else set(code.co_names)
