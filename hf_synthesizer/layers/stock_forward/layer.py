"""The layer that keeps the stock forward: synthesized logits in a stock forward, through Transformers' attention interface.

The stock forward projects, normalises and rotates queries and keys, updates its cache, and passes all of it to the attention
function that its config names. The config of such a layer names ours. So the dot products are exactly those of the stock
code. The price is that queries and keys are computed even if a variant does not use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import AttentionInterface

from ...errors import UnsupportedModelError
from ...logits.forms import Logits
from ...synthesizers import DotProductSynthesizer, HeadGroups, MixtureSynthesizer, Synthesizer
from ...synthesizers.config import LayerConfig
from ..caching import dropped_tokens, needs_of, past_length, self_attention_cache, tokens_before
from ..finding.layer_classes import is_understood
from ..finding.projections import (
    any_projection_names,
    find_projection_names,
    has_window,
    head_dim,
    in_features,
    query_heads,
    value_heads,
)
from ..finding.stock_code import asks_for_backend, uses_attention_interface
from ..forward import CachedTokens, has_position_ids
from ..refusals import unsupported
from .cache import KeySideCache
from .call import NAME, StockForwardCall, StockForwardConfig
from .compared_heads import ComparedHeads
from .dot_product import StockDotProduct, dot_product, filled, of_heads
from .refusals import (
    require_bias_of_positions,
    require_known_options,
    require_self_attention,
    require_unchanged_mask,
    require_whole_sequence,
)

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names of the cache in stock forwards."""


class StockForwardLayer(ComparedHeads):
    """A stock attention class whose forward runs as it is, with our attention function in place of its own."""

    counts_from_padding = True
    stock_parameters: ClassVar[list[str]]
    """Names of the parameters of the stock forward."""

    @property
    def logit_modules(self) -> list[nn.Module]:
        names = ["stock", *(name for name in self.projection_names.replaced if name != self.guard_name)]
        return [self.synthesizer, *(cast(nn.Module, self._modules[name]) for name in names)]

    @property
    def guard_name(self) -> str:
        # Not the query projection: it is still in its place here, and LoRA adapts it.
        return self.projection_names.fused or self.projection_names.key

    def projections_to_adapt(self) -> list[str]:
        names = self.projection_names
        compares = any(synthesizer.is_stock for _, synthesizer in self.synthesizers())
        used = [names.fused] if names.fused else [*((names.query, names.key) if compares else ()), names.value]
        others = [f"stock.{names.value}"] if "_values" in self.__dict__ else []
        return [*(f"stock.{name}" if name == self.guard_name else name for name in used), *others]

    def replace_projections(self, config: LayerConfig, example: torch.Tensor | None = None) -> None:
        """Add the synthesizer. One projection moves to `stock`, so that the guard can have its name.

        All other projections stay. If only some heads compare tokens, and the stock forward allows it, the query and key
        projections keep the rows of these heads alone.

        Raises:
            UnsupportedModelError: for a stock forward that may attend without calling our attention function.
        """
        if not uses_attention_interface(self.stock_class):
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} makes its dot products without Transformers' attention interface, so that none "
                f"can be had from it for a mixture. Leave dot_product out, or register a layer class that serves_dot_product."
            )
        understood = is_understood(self)
        if not understood and asks_for_backend(self.stock_class):
            raise unsupported(
                self.stock_class,
                "does more by the name of the attention backend than ask for its function, such as choosing keys by their "
                "content, and under synthesized attention it would not",
            )
        known = find_projection_names(self)
        self.projection_names = names = known or any_projection_names(self)
        hidden_size = in_features(cast(nn.Module, self._modules[names.fused or names.query]))
        heads = query_heads(self)
        width = head_dim(self) if known is not None and not known.fused else max(1, hidden_size // heads)
        self.__dict__["_dimensions"] = (hidden_size, heads, width)
        replaced = [cast(nn.Module, self._modules[name]) for name in names.replaced]
        count = sum(parameter.numel() for module in replaced for parameter in module.parameters())
        self.__dict__["_stock_logit_parameters"] = count
        device, dtype = self.device_and_dtype(cast(nn.Module, self._modules[self.guard_name]), example)
        self.synthesizer = self.build(config, device, dtype)
        other_values = self.keep_compared_heads()
        # No bool, because `equals_stock` remembers its answers by a layer's switches.
        self.__dict__["_passes_keys_on"] = (understood,)
        moved = {self.guard_name: cast(nn.Module, self._modules.pop(self.guard_name))}
        self._modules["stock"] = nn.ModuleDict({**moved, **other_values})
        self.place_guard(config, device)

    def take_projections(self, synthesizer: Synthesizer) -> Synthesizer:
        """`dot_product`, alone or as a part, gets its logits from the stock forward; a shared projection starts afresh."""
        if not isinstance(synthesizer, HeadGroups):
            return self._with_stock_dot_product(synthesizer, tuple(range(self.dimensions[1])))
        for name, heads, group in list(synthesizer.members()):
            synthesizer.groups[name] = self._with_stock_dot_product(group, heads)
        return synthesizer

    @staticmethod
    def _with_stock_dot_product(synthesizer: Synthesizer, heads: tuple[int, ...]) -> Synthesizer:
        """The synthesizer of these heads, with the stock dot products in place of a `dot_product` of ours."""
        stock = StockDotProduct(
            synthesizer.hidden_size, synthesizer.num_heads, synthesizer.max_length, synthesizer.config
        )
        stock.heads = heads
        stock.limits_reach = not isinstance(synthesizer, MixtureSynthesizer)
        if isinstance(synthesizer, MixtureSynthesizer) and "dot_product" in synthesizer.parts:
            synthesizer.parts["dot_product"] = stock
        return stock if isinstance(synthesizer, DotProductSynthesizer) else synthesizer

    def call_stock(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward. Its attention function is `attend_in_stock_forward`.

        Raises:
            UnsupportedModelError: for cross-attention, and if the stock forward does not pass exactly one sequence of queries
                for its hidden states to the attention function.
        """
        arguments = {**dict(zip(self.stock_parameters, args, strict=False)), **kwargs}
        hidden_states = arguments[self.stock_parameters[0]]
        call = StockForwardCall(self, arguments, hidden_states, None)
        require_self_attention(call)
        call.key_states = self.synthesizer.project_keys(hidden_states)
        cache = call.first(CACHES)
        if cache is not None:
            call.cache, call.start = cache, past_length(cache, self.layer_idx)
            if self.__dict__["_passes_keys_on"] == (True,):
                call.needs = needs_of(self.synthesizer, self.backend != "eager" and not has_window(self))
            drops = any(need.near is not None for need in call.needs)
            if call.key_states is not None or self.kept_keys is not None or drops:
                wide = KeySideCache(self_attention_cache(cache), self, call)
                args = tuple(wide if value is cache else value for value in args)
                kwargs = {name: wide if value is cache else value for name, value in kwargs.items()}
        output = self.stock_class.forward(self.inside(call), *args, **kwargs)
        if not call.answered:
            raise unsupported(
                self.stock_class,
                "attended without Transformers' attention interface, so that nothing could be synthesized",
            )
        return output

    def inside(self, call: StockForwardCall) -> StockForwardLayer:
        """The `self` of the stock forward in one call: projections in their places, our config, and the call for our function."""
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__)
        stock = cast(nn.ModuleDict, self._modules["stock"])
        layer.__dict__["_modules"] = {**self._modules, self.guard_name: stock[self.guard_name]}
        layer.__dict__["config"] = StockForwardConfig(self.config)
        layer.__dict__["_call"] = call
        return layer

    def attend_in_stock_forward(
        self,
        call: StockForwardCall,
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
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The work of our attention function: the output (B, Lq, H, d_v), and weights under eager.

        Args:
            call: this forward pass.
            query: (B, H, Lq, d_h). Queries and keys may be those of the comparing heads alone.
            key: (B, G, Lk, d_h) for G ≤ H groups of heads.
            value: (B, G, Lk, d_v), or those of the comparing heads if one projection makes all three.
            mask: (B, 1 or H, Lq, Lk), bool or additive, or None.
            scaling: the factor of the dot products.
            dropout: 0 outside training.
            softcap: c of `c · tanh(logits / c)`, which caps the dot products.
            position_bias: added to the logits.
            is_causal: whether a query sees only the past if there is no mask.
            **options: everything else that the stock forward passes on.
        """
        require_known_options(call, options)
        self.require_backend(mask, **options)
        require_whole_sequence(call, query)
        require_unchanged_mask(call, mask)
        require_bias_of_positions(call, position_bias)
        call.answered = True
        unchanged = call.returned is not None and key is call.returned[0] and value is call.returned[1]
        heads, length = self.dimensions[1], query.shape[2]
        value = self.all_values(value, call.hidden_states)
        shared = heads // value_heads(self) if call.step is not None else heads // value.shape[1]
        all_queries, all_keys = query.shape[1] == heads, key.shape[1] == value.shape[1]
        position_ids, key_length = call.arguments.get("position_ids"), value.shape[-2]
        start = tokens_before(call.start, length, key_length, has_position_ids(position_ids, length))
        dropped = dropped_tokens(call.cache, self.layer_idx, key_length)
        positions = self.positions(position_ids, mask, length, key_length, start, dropped)
        all_tokens = CachedTokens(
            call.cache, call.needs, start, key_length, dropped, call.key_states, value, call.step
        )

        def query_of(wanted: Sequence[int]) -> torch.Tensor:
            return of_heads(query, wanted if all_queries else [self.compared.index(head) for head in wanted])

        def dot_products(wanted: Sequence[int], number: int | None = None) -> Logits:
            groups = [head // shared for head in wanted]
            if call.step is not None and number is not None:
                keys = call.step.kept.keys(number, groups)
            else:
                keys = of_heads(key, groups if all_keys else [cast(list, self.kept_keys).index(one) for one in groups])
            return dot_product(query_of(wanted), keys, scaling, softcap)

        if call.step is not None:
            if not unchanged:
                raise unsupported(
                    self.stock_class,
                    "changes keys or values between its cache and its attention function, and the cache has dropped tokens",
                )
            output, weights = call.step.attend(
                call.hidden_states,
                positions,
                self.whole_mask(mask, positions, position_bias, is_causal),
                dropout,
                self.backend == "eager",
                heads,
                lambda logits, number: filled(logits, partial(dot_products, number=number)),
            )
            output = output.transpose(1, 2)
        else:
            logits = filled(self.synthesizer(call.hidden_states, call.key_states, positions), dot_products)
            output, weights = self.attend(logits, value, mask, positions, position_bias, is_causal, dropout)
            output = output.unflatten(-1, (heads, -1))
        if unchanged and any(need.near is not None for need in call.needs):
            compared = {"key": key, **self.keys_of_needs(call.needs, key, shared)} if call.step is None else {}
            place = (all_tokens, call.hidden_states, mask, positions, position_bias, is_causal)
            self.drop_tokens(*place, **compared)
        return output, weights


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
    """Our function in Transformers' attention interface; `module` comes from `StockForwardLayer.inside`.

    For `dot_product` alone, it calls the function of the model's own backend.
    """
    call: StockForwardCall = module.__dict__["_call"]
    layer = call.layer
    config = layer.synthesizer.config
    if config.variant == "dot_product" and config.options.get("window") is None:
        call.answered = True
        eager = inspect.unwrap(layer.stock_class.forward).__globals__.get("eager_attention_forward")
        stock = AttentionInterface().get_interface(layer.backend, eager)
        return stock(layer, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return layer.attend_in_stock_forward(
        call, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


AttentionInterface.register(NAME, attention)
