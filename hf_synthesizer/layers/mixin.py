"""What all model types share: a stock attention module whose logits are synthesized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..attend import attend
from ..device.matmul import linear
from ..device.offloading import require_in_memory
from ..errors import UnsupportedModelError
from ..logits.forms import Logits
from ..logits.masks import AttentionMask
from ..logits.positions import Positions, exporting
from ..synthesizers import DotProductSynthesizer, HeadGroups, Synthesizer, build_synthesizer
from ..synthesizers.config import LayerConfig, SynthesizerConfig, layer_config
from ..synthesizers.registry import get_variant
from ..synthesizers.stock_weights import place_of
from ..upstream.transformers_names import LOADED
from .caching import dropped_tokens, extend, require_known_arguments
from .guard import Guard, require_tensors
from .layer_classes import serving_class
from .lengths import longest_sequence
from .norms import set_norms_aside
from .own_forwards import move_hooks, require_plain_call
from .projections import (
    OUTPUT_DROPOUTS,
    ProjectionNames,
    dropout_probability,
    find_projection_names,
    has_window,
    head_dim,
    in_features,
    projection_of,
    query_heads,
)

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

BACKENDS = ("eager", "sdpa")
SINCE_THEN = ".mixing_change"
"""A tensor that checkpoints of `mixing="sum"` did not have at first: α itself was in `mixing_weights`, and this is 0."""


class SynthesizerMixin(nn.Module):
    """Mixed into a stock attention class: `class SynthesizerXxx(Layer, Xxx)`, where a layer class is a subclass of this.

    The stock module keeps its values, its output and its place in the model; its query and key projections go,
    `synthesizer` makes the logits, and a `Guard` stands where the query projection was. Where the module keeps what is found by its names (`projections.py`); a layer class adds how its
    forward signature reads.
    """

    serves_dot_product: ClassVar[bool] = False
    """Whether logits with a `dot_product` part are made here too. Else the stock forward makes that part (`stock_forward.py`)."""
    compares_some_heads: ClassVar[bool] = False
    """Whether they are made here where some heads alone compare tokens: stock logits are `q · k · scaling` and nothing else,
    and the stock forward would have to make the queries and keys of all heads."""
    knows: ClassVar[frozenset[str]] = frozenset()
    """Names in a stock forward which this layer class has an answer to, beyond those that all layer classes understand (`registry.py`)."""
    counts_from_padding: ClassVar[bool] = False
    """Whether positions start at a row's first visible key, where no `position_ids` say where tokens stand."""
    stock_class: ClassVar[type[nn.Module]]
    """The class that this one extends."""
    projection_names: ProjectionNames
    config: Any
    layer_idx: Any = None
    synthesizer: Synthesizer
    whole: bool = False
    """Whether stock projections stay whole where the stock forward could do with the rows of some heads: as a checkpoint says."""

    def __init__(self, *args: Any, synthesizer: str | SynthesizerConfig, **kwargs: Any):
        """As the stock class, with fresh weights, and a variant or a configuration of the logits."""
        super().__init__(*args, **kwargs)
        config: LayerConfig = SynthesizerConfig(synthesizer) if isinstance(synthesizer, str) else synthesizer
        config = layer_config(config, query_heads(self))
        if config.max_length is None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, PreTrainedConfig)), None)
            config = config.for_length(longest_sequence(given or self.config, self.stack))
        self.__class__ = serving_class(type(self), config, self)
        self.replace_projections(config)
        set_norms_aside(self, config)

    @property
    def stack(self) -> str:
        """What kind of stack the module says it belongs to."""
        return "decoder" if getattr(self, "is_decoder", False) else "encoder"

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """hidden_size, num_heads and head_dim of the stock module."""
        return self.__dict__["_dimensions"]

    @property
    def dropout_probability(self) -> float:
        """With which probability the stock module drops a weight in training."""
        return dropout_probability(self)

    @property
    def logit_scaling(self) -> float:
        """The factor of the stock layer's dot products."""
        return float(getattr(self, "scaling", getattr(self, "scale", self.dimensions[2] ** -0.5)))

    @classmethod
    def from_stock(
        cls, stock: nn.Module, config: LayerConfig, example: torch.Tensor | None = None, *, whole: bool = False
    ) -> SynthesizerMixin:
        """A synthesized twin of a stock module, which is left as it was.

        The twin shares everything with it (values, dropout, hooks, train or eval mode) but the two projections. `example`
        is a floating-point tensor of the model around it, for a module that was quantized. With `whole` no projection that
        stays is cut down to some heads.

        Raises:
            UnsupportedModelError: for a module that is offloaded, was compiled, or has a forward of its own on its object.
        """
        require_in_memory(stock, f"A layer of {type(stock).__name__} cannot be patched")
        require_plain_call(stock)
        twin = serving_class(cls, config, stock).twin_of(stock, config, example, whole=whole)
        move_hooks(stock, twin)
        return twin

    @classmethod
    def twin_of(
        cls, stock: nn.Module, config: LayerConfig, example: torch.Tensor | None = None, *, whole: bool = False
    ) -> SynthesizerMixin:
        """`from_stock` of this very class."""
        twin = cls.__new__(cls)
        twin.__dict__.update(stock.__dict__)
        for registry in ("_modules", "_parameters", "_buffers"):
            twin.__dict__[registry] = dict(stock.__dict__[registry])
        twin.__dict__["whole"] = whole
        twin.replace_projections(config, example)
        set_norms_aside(twin, config)
        for part in twin.modules() if getattr(stock, LOADED, False) else (twin,):
            # A model around the layer must not start its parts afresh, no more than the stock layer's; and in the layer itself it would
            # look for queries and keys (`checkpoints/initialization.py` does that instead).
            part.__dict__[LOADED] = True
        return twin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict that has this layer's values must have its synthesizer, even where missing keys are allowed.

        Trainer loads its checkpoints so; a stock one would leave the synthesizer as it was, with no more than a
        warning.
        """
        names = [
            name for name in self.state_dict() if name.startswith("synthesizer.") and not name.endswith(SINCE_THEN)
        ]
        require_tensors(state_dict, prefix, names, beside=f"{self.projection_names.value}.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def stock_logit_parameters(self) -> int:
        """How many parameters the projections had that are gone."""
        return self.__dict__["_stock_logit_parameters"]

    @property
    def logit_modules(self) -> list[nn.Module]:
        """What makes the logits now."""
        return [self.synthesizer]

    @property
    def backend(self) -> str:
        """The attention backend that the model asks for."""
        return self.config._attn_implementation

    @property
    def guard_name(self) -> str:
        """The projection whose stock name a checkpoint takes, so that no stock class fits it."""
        return self.projection_names.fused or self.projection_names.query

    def projections_to_adapt(self) -> list[str]:
        """What of the pretrained attention is still computed, but for the output: by LoRA's custom, what is adapted."""
        comparing = [name for name, made in self.synthesizers() if isinstance(made, DotProductSynthesizer)]
        return [self.projection_names.value, *(f"{name}.{part}" for name in comparing for part in ("query", "key"))]

    def synthesizers(self) -> Iterator[tuple[str, Synthesizer]]:
        """What makes the logits, one for each group of heads, with their names in the layer."""
        if isinstance(self.synthesizer, HeadGroups):
            yield from ((f"synthesizer.groups.{name}", group) for name, _, group in self.synthesizer.members())
        else:
            yield "synthesizer", self.synthesizer

    def replace_projections(self, config: LayerConfig, example: torch.Tensor | None = None) -> None:
        """Put a synthesizer where the query and key projections were, on their device and with their dtype.

        Quantized ones may have none; then it is that of `example`, or torch's default.
        """
        projection_names = find_projection_names(self)
        if projection_names is None:
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} names its projections in a way that no layer class knows: {', '.join(self._modules)}."
            )
        self.projection_names = projection_names
        hidden_size = in_features(cast(nn.Module, self._modules[projection_names.fused or projection_names.value]))
        self.__dict__["_dimensions"] = (hidden_size, query_heads(self), head_dim(self))
        projection = cast(nn.Module, self._modules[self.guard_name])
        synthesizer = self.build(config, projection, example)
        value = projection_of(self, projection_names, "value") if projection_names.fused else None
        gone = [cast(nn.Module, self._modules.pop(name)) for name in projection_names.replaced]
        lost = sum(parameter.numel() for module in gone for parameter in module.parameters())
        if value is not None:
            self._modules[projection_names.value] = value
            lost -= sum(parameter.numel() for parameter in value.parameters())
        self.__dict__["_stock_logit_parameters"] = lost
        self.synthesizer = synthesizer
        self.stand_guard(config, self.place_of(projection, example)[0])

    def build(self, config: LayerConfig, projection: nn.Module, example: torch.Tensor | None) -> Synthesizer:
        """A fresh synthesizer, where a stock projection is and of its dtype."""
        hidden_size, heads, width = self.dimensions
        device, dtype = self.place_of(projection, example)
        with torch.device(device):
            synthesizer = build_synthesizer(config, hidden_size, heads, config.max_length or 0, head_dim=width)
        synthesizer.to(dtype)
        synthesizer.set_causal(bool(getattr(self, "is_causal", False)))
        return self.take_projections(synthesizer).train(self.training)

    @staticmethod
    def place_of(projection: nn.Module, example: torch.Tensor | None) -> tuple[torch.device, torch.dtype]:
        """The device and dtype of a stock projection; a quantized one may have the example's, or torch's own."""
        return place_of(projection, torch.empty(0) if example is None else example)

    def take_projections(self, synthesizer: Synthesizer) -> Synthesizer:
        """Hand the stock query and key projections to a synthesizer that has a use for them, and give it back."""
        if any(get_variant(part).load_stock is not Synthesizer.load_stock for part in synthesizer.config.parts):
            query, key = (projection_of(self, self.projection_names, name) for name in ("query", "key"))
            synthesizer.load_stock(query=query, key=key, scaling=self.logit_scaling)
        return synthesizer

    def stand_guard(self, config: LayerConfig, device: torch.device) -> None:
        """Put a guard under the stock name of the projection that is gone or has moved."""
        self._modules[self.guard_name] = Guard(config, device).train(self.training)

    def attend_to_itself(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        position_bias: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        is_causal: bool | None = None,
        need_weights: bool | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What most forwards are: values, cache, positions, logits and softmax, output projection.

        Args:
            hidden_states: (B, L, d).
            attention_mask: (B, 1 or H, Lq, Lk), bool or additive, or None.
            past_key_values: the cache of a decoder.
            position_bias: (1 or B, H, Lq, Lk), added to the logits.
            position_ids: (B or 1, L), where the tokens stand.
            is_causal: whether a query sees the past alone where there is no mask; as the module says if None.
            need_weights: whether weights are wanted; under eager only, if None.
            **arguments: what else the caller gave.

        Raises:
            UnsupportedModelError: for an argument that changes attention and is unknown here.
        """
        self.require_backend(attention_mask, **arguments)
        length, value = hidden_states.shape[1], self.project_values(hidden_states)
        known = says_positions(position_ids, length)
        key_states, value, past_length = self.update_cache(hidden_states, value, past_key_values, known)
        dropped = dropped_tokens(past_key_values, self.layer_idx, value.shape[-2])
        positions = self.positions(position_ids, attention_mask, length, value.shape[-2], past_length, dropped)
        logits = self.synthesizer(hidden_states, key_states, positions)
        output, weights = self.attend(
            logits, value, attention_mask, positions, position_bias, is_causal, need_weights=need_weights
        )
        return self.project_output(output, hidden_states), weights

    def require_own_states(self, other: torch.Tensor | None) -> None:
        """Raise `UnsupportedModelError` where a layer is given other states to attend to than its own."""
        if other is not None:
            raise UnsupportedModelError(
                "A synthesizer replaces self-attention only, but states of an encoder were given (key_value_states or "
                "encoder_hidden_states), which means cross-attention. Leave the cross-attention layer as it is."
            )

    def project_values(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The values (B, G, L, d_v) of G ≤ H groups of heads."""
        batch, length, _ = hidden_states.shape
        projected = linear(cast(nn.Module, self._modules[self.projection_names.value]), hidden_states)
        return projected.view(batch, length, -1, self.dimensions[2]).transpose(1, 2)

    def project_output(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the stock module does behind attention, to (B, L, H·d_v)."""
        if self.projection_names.output is not None:
            output = linear(cast(nn.Module, self._modules[self.projection_names.output]), output)
        for name in OUTPUT_DROPOUTS:
            if name in self._modules:
                output = cast(nn.Module, self._modules[name])(output)
        return output

    def positions(
        self,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        length: int,
        key_length: int,
        start: int | torch.Tensor,
        dropped: int = 0,
    ) -> Positions:
        """Where queries and keys stand: by `position_ids`, else by padding on the left where the model counts from there."""
        if says_positions(position_ids, length):
            windowed = has_window(self)
            return Positions.from_position_ids(position_ids, length, key_length, start, mask, dropped, windowed)
        if self.counts_from_padding:
            return Positions.from_left_padding(mask, length, key_length, start)
        return Positions.from_position_ids(None, length, key_length, start)

    def require_backend(self, mask: Any, **arguments: Any) -> None:
        """Raise `UnsupportedModelError` for what this layer cannot serve as the stock one would.

        That is an argument (`arguments`: those that the layer class has no answer to) which changes what is computed, and an
        attention backend whose masks cannot be read.
        """
        require_known_arguments(arguments)
        backend = self.backend
        if backend not in BACKENDS or not (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4)):
            found = f"a mask of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedModelError(
                f"Synthesized attention runs under the backends {' and '.join(BACKENDS)}; this model asks for "
                f"{backend!r} and passes {found} as mask. Call model.set_attn_implementation('sdpa'), or load the "
                f"model with attn_implementation='sdpa'."
            )

    def attend(
        self,
        logits: Logits,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        dropout: float | None = None,
        need_weights: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, mask, softmax and values: output (B, Lq, H·d_v), and weights (B, H, Lq, Lk) under eager.

        Args:
            logits: what the synthesizer made.
            value: (B, H, Lk, d_v), or (B, G, Lk, d_v) where groups of heads share values; cached ones included.
            mask: as Transformers' eager and sdpa backends pass it.
            positions: of queries and keys.
            position_bias: (1 or B, H, Lq, Lk), added to the logits.
            is_causal: whether a query sees the past alone where there is no mask; as the module says if None.
            dropout: the probability with which a weight is dropped; the module's own in training, else 0, if None.
            need_weights: whether weights are wanted; under eager only, if None.
        """
        if dropout is None:
            dropout = self.dropout_probability if self.training else 0.0
        if value.shape[1] != self.dimensions[1]:
            value = value.repeat_interleave(self.dimensions[1] // value.shape[1], dim=1)
        if is_causal is None:
            # What Transformers' own functions assume of a module that does not say.
            is_causal = getattr(self, "is_causal", self.backend == "sdpa")
        guard = self._modules[self.guard_name]
        if isinstance(guard, Guard):  # PEFT may have wrapped it
            guard.require(f"layer {self.layer_idx} of this model")
        # Under sdpa Transformers passes no mask where a plain triangle would do: the module itself has to be causal. Under
        # eager no mask means that everybody sees everything, whatever a module says of itself.
        causal = is_causal and self.backend == "sdpa" and mask is None and not positions.at_the_end
        attention_mask = AttentionMask.from_tensor(mask, causal_offset=positions.start if causal else None)
        output, weights = attend(
            logits,
            value,
            attention_mask.with_bias(position_bias),
            dropout=dropout,
            need_weights=self.backend == "eager" if need_weights is None else need_weights,
        )
        output = output.transpose(1, 2)  # (B, Lq, H, d_v)
        if exporting():
            # How a kernel lays out its output here is no promise for the one that runs there.
            output = output.clone(memory_format=torch.contiguous_format)
        return output.flatten(2), weights

    def update_cache(
        self,
        hidden_states: torch.Tensor,
        value: torch.Tensor,
        past_key_values: Cache | None,
        positions_known: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor, int | torch.Tensor]:
        """Add the new tokens to the cache: key states and values of all tokens, and how many indices lie before (`extend`)."""
        key_states = self.synthesizer.project_keys(hidden_states)
        return extend(past_key_values, self.layer_idx, key_states, value, positions_known)


def says_positions(position_ids: torch.Tensor | None, length: int) -> bool:
    """Whether these are the positions of that many tokens, one number each."""
    return position_ids is not None and position_ids.dim() == 2 and position_ids.shape[-1] == length
