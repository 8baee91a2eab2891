"""The layer that keeps the stock forward: synthesized logits inside a layer's own stock forward, through Transformers' attention interface.

The stock forward projects, normalises and rotates queries and keys, keeps its cache, and hands all of it to the attention
function that its config names. A stock-forward layer's config names ours, so that the dot products are the stock code's own and equal to
it by construction; the price is that queries and keys are computed whether or not a variant looks at them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import AttentionInterface

from ..errors import UnsupportedModelError
from ..logits.forms import Logits
from ..synthesizers import DotProductSynthesizer, HeadGroups, MixtureSynthesizer, Synthesizer
from ..synthesizers.config import LayerConfig
from ..upstream.torch_names import base_of
from .caching import dropped_tokens, past_length, self_attention_cache, tokens_before
from .compared_heads import ComparedHeads
from .layer_classes import is_understood
from .mixin import says_positions
from .projections import any_projection_names, find_projection_names, head_dim, in_features, query_heads
from .stock_code import asks_for_backend, uses_attention_interface
from .stock_dot_product import StockDotProduct, dot_product, filled, of_heads
from .stock_forward_cache import KeySideCache

NAME = "hf_synthesizer"
"""What our attention function is called in Transformers' interface."""
CROSS_ATTENTION = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


class StockForwardConfig:
    """A layer's config, under which the layer asks for our attention function; everything else is the config's own."""

    def __init__(self, config: Any):
        self.__dict__["config"] = config

    @property
    def _attn_implementation(self) -> str:
        return NAME

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # while it is copied or unpickled, there is no config yet
            raise AttributeError(name)
        return getattr(self.__dict__["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)


@dataclass
class Call:
    """One forward pass of a layer that keeps the stock forward, `layer`: what goes in (`given` are the names), and what the logits need to know of the keys'
    tokens."""

    layer: StockForwardLayer
    hidden_states: torch.Tensor
    start: int | torch.Tensor
    position_ids: torch.Tensor | None
    key_states: torch.Tensor | None
    mask: torch.Tensor | None
    given: Collection[str]
    cache: Any = None
    answered: bool = False


class StockForwardLayer(ComparedHeads):
    """A stock attention class whose forward runs as it is, with our attention function in place of its own."""

    counts_from_padding = True
    stock_parameters: ClassVar[list[str]]
    """What the stock forward calls its parameters."""

    @property
    def logit_modules(self) -> list[nn.Module]:
        own = [name for name in self.projection_names.replaced if name != self.guard_name]
        return [self.synthesizer, cast(nn.Module, self._modules["stock"]), *(self._modules[name] for name in own)]  # type: ignore[list-item]

    @property
    def guard_name(self) -> str:
        # Not the query projection: that is what people adapt with LoRA, and here it is still at its place.
        return self.projection_names.fused or self.projection_names.key

    def replace_projections(self, config: LayerConfig, example: torch.Tensor | None = None) -> None:
        """Add the synthesizer. One projection moves to `stock`, so that a guard may have its name. Nothing goes, but where
        some heads alone compare tokens the rows of all others' queries and keys, if the stock forward can do without.

        Raises:
            UnsupportedModelError: for a stock forward that cannot be relied on to ask our attention function, and it alone.
        """
        if not uses_attention_interface(self.stock_class):
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} makes its dot products without Transformers' attention interface, so that none "
                f"can be had from it for a mixture. Leave dot_product out, or register a layer class that serves_dot_product."
            )
        if not is_understood(self) and asks_for_backend(self.stock_class):
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} does more by the name of the attention backend than ask for its function, such "
                f"as choosing keys by their content, and under synthesized attention it would not. Patch other layers "
                f"(layers=…), or register a layer class for this class."
            )
        known = find_projection_names(self)
        self.projection_names = known or any_projection_names(self)
        moved = cast(nn.Module, self._modules[self.guard_name])
        hidden_size = in_features(
            cast(nn.Module, self._modules[self.projection_names.fused or self.projection_names.query])
        )
        heads = query_heads(self)
        separate = known is not None and not known.fused
        width = head_dim(self) if separate else max(1, hidden_size // heads)
        self.__dict__["_dimensions"] = (hidden_size, heads, width)
        kept = [cast(nn.Module, self._modules[name]) for name in self.projection_names.replaced]
        lost = sum(parameter.numel() for module in kept for parameter in module.parameters())
        self.__dict__["_stock_logit_parameters"] = lost
        self.synthesizer = self.build(config, moved, example)
        beside = self.keep_compared_heads()
        name = self.guard_name
        moved = cast(nn.Module, self._modules[name])
        self._modules["stock"] = nn.ModuleDict({name: moved, **beside})
        del self._modules[name]
        self.stand_guard(config, self.place_of(moved, example)[0])

    def take_projections(self, synthesizer: Synthesizer) -> Synthesizer:
        """`dot_product`, alone or as a part, gets its logits from the stock forward; a shared projection starts afresh."""
        groups = synthesizer.groups if isinstance(synthesizer, HeadGroups) else None
        members = [("", tuple(range(self.dimensions[1])), synthesizer)]
        if isinstance(synthesizer, HeadGroups):
            members = list(synthesizer.members())
        for name, heads, group in members:
            given = StockDotProduct(group.hidden_size, group.num_heads, group.max_length, group.config)
            given.heads = heads
            if isinstance(group, MixtureSynthesizer) and "dot_product" in group.parts:
                group.parts["dot_product"] = given
            elif isinstance(group, DotProductSynthesizer):
                if groups is None:
                    return given
                groups[name] = given
        return synthesizer

    def call_stock(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward; its attention function is `attend_in_stock_forward`.

        What belongs to one call stays with that call: several threads may use the same layer.

        Raises:
            UnsupportedModelError: for cross-attention, and where the stock forward does not hand over exactly one sequence
                of queries for the hidden states it was given.
        """
        given = {**dict(zip(self.stock_parameters, args, strict=False)), **kwargs}
        if any(given.get(name) is not None for name in CROSS_ATTENTION):
            raise UnsupportedModelError(
                f"A synthesizer replaces self-attention only, but {self.stock_class.__name__} was given other states to "
                f"attend to. Leave the cross-attention layer as it is (layers=…)."
            )
        hidden_states = given[self.stock_parameters[0]]
        cache_name = next((name for name in CACHES if given.get(name) is not None), None)
        key_states, start = self.synthesizer.project_keys(hidden_states), 0
        mask = next((given[name] for name in MASKS if given.get(name) is not None), None)
        call = Call(self, hidden_states, start, given.get("position_ids"), key_states, mask, given)
        if cache_name is not None:
            cache = given[cache_name]
            call.cache, call.start = cache, past_length(cache, self.layer_idx)
            if key_states is not None or self.kept_keys is not None:
                wide = KeySideCache(self_attention_cache(cache), self, call)
                args = tuple(wide if value is cache else value for value in args)
                kwargs = {name: wide if value is cache else value for name, value in kwargs.items()}
        output = self.stock_class.forward(self.inside(call), *args, **kwargs)
        if not call.answered:
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} attended without Transformers' attention interface, so that nothing could be "
                f"synthesized. Patch other layers (layers=…), or register a layer class for this class."
            )
        return output

    def inside(self, call: Call) -> StockForwardLayer:
        """This layer as the stock forward sees it during one call: its projections at their places, our attention function in
        its config, and the call, which that function reads."""
        seen = object.__new__(type(self))
        seen.__dict__.update(self.__dict__)
        stock = cast(nn.ModuleDict, self._modules["stock"])
        seen.__dict__["_modules"] = {**self._modules, self.guard_name: stock[self.guard_name]}
        seen.__dict__["config"] = StockForwardConfig(self.config)
        seen.__dict__["_call"] = call
        return seen

    def attend_in_stock_forward(
        self,
        call: Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float | None,
        dropout: float,
        softcap: float | None = None,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What our attention function does: the output (B, Lq, H, d_v), and weights under eager.

        Args:
            call: the forward pass that asks.
            query: (B, H, Lq, d_h).
            key: (B, G, Lk, d_h) for G ≤ H groups of heads. Of queries and keys, those of the heads that compare tokens suffice.
            value: (B, G, Lk, d_v), or those of the heads that compare tokens, where all are projected together.
            mask: (B, 1 or H, Lq, Lk), bool or additive, or None.
            scaling: the factor of the dot products.
            dropout: 0 outside training.
            softcap: c of `c · tanh(logits / c)`, which caps the dot products.
            position_bias: added to the logits.
            is_causal: whether a query sees the past alone where there is no mask.
            **arguments: what else the stock forward passes on.
        """
        hidden_states = call.hidden_states
        self.require_understood(call, arguments)
        self.require_backend(mask, **arguments)
        self.require_whole(call, query)
        self.require_given(call, mask)
        self.require_bias_of_positions(call, position_bias)
        call.answered = True
        heads, length = self.dimensions[1], query.shape[2]
        value = self.all_values(value, call.hidden_states)
        shared = heads // value.shape[1]
        whole = (query.shape[1] == heads, key.shape[1] == value.shape[1])
        if shared > 1:
            value = value.repeat_interleave(shared, dim=1)

        def dot_products(wanted: Sequence[int]) -> Logits:
            queries = wanted if whole[0] else [self.compared.index(head) for head in wanted]
            keys = [head // shared for head in wanted]
            keys = keys if whole[1] else [cast(list, self.kept_keys).index(group) for group in keys]
            return dot_product(of_heads(query, queries), of_heads(key, keys), scaling, softcap)

        known = says_positions(call.position_ids, length)
        start = tokens_before(call.start, length, value.shape[-2], known)
        dropped = dropped_tokens(call.cache, self.layer_idx, value.shape[-2])
        positions = self.positions(call.position_ids, mask, length, value.shape[-2], start, dropped)
        logits = filled(self.synthesizer(hidden_states, call.key_states, positions), dot_products)
        output, weights = self.attend(logits, value, mask, positions, position_bias, is_causal, dropout)
        return output.unflatten(-1, (heads, -1)), weights

    def projections_to_adapt(self) -> list[str]:
        moved = {self.guard_name: f"stock.{self.guard_name}"}
        projection_names = self.projection_names
        used = (
            (projection_names.query, projection_names.key)
            if any(made.is_stock for _, made in self.synthesizers())
            else ()
        )
        names = [projection_names.fused] if projection_names.fused else [*used, projection_names.value]
        beside = [f"stock.{projection_names.value}"] if "_values" in self.__dict__ else []
        return [*(moved.get(name, name) for name in names), *beside]

    def require_whole(self, call: Call, query: torch.Tensor) -> None:
        """Raise `UnsupportedModelError` unless these are the queries of the hidden states, all of them, and once."""
        states, width = call.hidden_states, self.dimensions[0]
        fits = states.dim() == 3 and states.shape[:2] == (query.shape[0], query.shape[2]) and states.shape[-1] == width
        if call.answered:
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} attends more than once in one forward pass, and synthesized logits could stand "
                f"in for one of them only. Patch other layers (layers=…), or register a layer class for this class."
            )
        if not fits or query.shape[1] not in (self.dimensions[1], len(self.compared)):
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} attends in pieces: for hidden states of shape {tuple(states.shape)} it hands "
                f"over queries of shape {tuple(query.shape)}. Positions in such a sequence are not known here. Patch other "
                f"layers (layers=…), or register a layer class for this class."
            )

    def require_given(self, call: Call, mask: torch.Tensor | None) -> None:
        """Raise `UnsupportedModelError` where the stock forward added logits of its own to the mask that it was given.

        They may come of queries (relative positions, as Transformer-XL has them), which no synthesizer replaces then.
        """
        if mask is None or mask.dtype == torch.bool or mask is call.mask:
            return
        base = base_of(mask)
        if call.mask is not None and base is not None and (base is call.mask or base is base_of(call.mask)):
            return
        hidden = torch.finfo(mask.dtype).min / 2
        if mask.is_meta:  # nothing is computed there
            return
        if torch.compiler.is_compiling() or not bool(((mask == 0) | (mask < hidden)).all()):
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} adds logits of its own to its mask, which would stay beside synthesized ones. "
                f"Patch it with dot_product alone or patch other layers (layers=…), or register a layer class for this class."
            )

    def require_bias_of_positions(self, call: Call, position_bias: torch.Tensor | None) -> None:
        """Raise `UnsupportedModelError` for a bias that the stock forward made of its tokens, and not of positions as T5 does."""
        if position_bias is None or "position_bias" in call.given or hasattr(self, "has_relative_attention_bias"):
            return
        raise UnsupportedModelError(
            f"{self.stock_class.__name__} makes a bias of its own, which may come of its tokens and would stay beside synthesized "
            f"logits. Patch it with dot_product alone or patch other layers (layers=…), or register a layer class for this class."
        )

    def require_understood(self, call: Call, arguments: dict[str, Any]) -> None:
        """Raise `UnsupportedModelError` for what the stock forward itself tells its attention function, and ours cannot heed:
        sinks, chosen keys, and whatever is new."""
        for name, value in arguments.items():
            if value is not None and name not in call.given and name not in UNDER_THE_MASK:
                raise UnsupportedModelError(
                    f"{self.stock_class.__name__} passes {name}= on to its attention function, which may change attention in a "
                    f"way that synthesized layers do not know. Patch other layers (layers=…), or register a layer class for this class."
                )


UNDER_THE_MASK = frozenset(
    [
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "position_ids",
        "sliding_window",
    ]
)
"""What stock forwards pass on that eager and sdpa attention do not read: it is in the mask, or means other backends."""
MASKS = ("attention_mask", "mask")
"""What stock forwards call their mask."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What stock forwards call their cache."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Our function in Transformers' attention interface; `module` is what `StockForwardLayer.inside` makes.

    Where `dot_product` stands alone, it is the function of the model's own backend.
    """
    call: Call = module.__dict__["_call"]
    layer = call.layer
    if layer.synthesizer.config.variant == "dot_product":
        call.answered = True
        eager = inspect.unwrap(layer.stock_class.forward).__globals__.get("eager_attention_forward")
        stock = AttentionInterface().get_interface(layer.backend, eager)
        return stock(layer, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return layer.attend_in_stock_forward(
        call, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


AttentionInterface.register(NAME, attention)
