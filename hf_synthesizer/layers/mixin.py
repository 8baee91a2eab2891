"""How a stock attention module becomes a synthesized layer: its projections are replaced by a synthesizer and a guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..device.offloading import require_in_memory
from ..errors import UnsupportedModelError
from ..synthesizers import DotProductSynthesizer, HeadGroups, Synthesizer, build_synthesizer
from ..synthesizers.config import LayerConfig, SynthesizerConfig, layer_config
from ..synthesizers.registry import get_variant
from ..synthesizers.stock_weights import place_of
from ..upstream.transformers_names import LOADED
from .finding.layer_classes import serving_class
from .finding.projections import find_projection_names, head_dim, in_features, projection_of, query_heads
from .forward import SelfAttentionForward
from .guard import Guard, require_tensors
from .norms import set_norms_aside
from .object_forward import move_hooks, require_plain_call


class SynthesizerMixin(SelfAttentionForward):
    """Mixed into a stock attention class: `class SynthesizerXxx(Layer, Xxx)`. `Layer`, a layer class, is a subclass of this one.

    The stock module keeps its values, its output projection and its place in the model. Its query and key projections go,
    `synthesizer` computes the logits, and a `Guard` has the name of the query projection. The projections are found by
    their names (`finding/projections.py`). A layer class adds the forward signature.
    """

    serves_dot_product: ClassVar[bool] = False
    """Whether this forward computes logits with a `dot_product` part. If not, the stock forward does (`stock_forward/`)."""
    compares_some_heads: ClassVar[bool] = False
    """Whether this forward computes them if only some heads compare tokens. Then the stock logits must be
    `q · k · scaling` and nothing else. (The stock forward would have to project the queries and keys of all heads.)"""
    knows: ClassVar[frozenset[str]] = frozenset()
    """Names in a stock forward that this layer class handles, beyond those that all layer classes handle
    (`finding/layer_classes.py`)."""
    stock_class: ClassVar[type[nn.Module]]
    """The class that this one extends."""
    keeps_all_rows: bool = False
    """Whether the stock projections that stay keep the rows of all heads, as a checkpoint says."""

    def __init__(self, *args: Any, synthesizer: str | SynthesizerConfig, **kwargs: Any):
        """As the stock class, with fresh weights, and a variant or a configuration of the logits."""
        from .lengths import longest_sequence

        super().__init__(*args, **kwargs)
        config: LayerConfig = SynthesizerConfig(synthesizer) if isinstance(synthesizer, str) else synthesizer
        config = layer_config(config, query_heads(self))
        if config.lacks_length:
            model_configs = (value for value in (*args, *kwargs.values()) if isinstance(value, PreTrainedConfig))
            stack = "decoder" if getattr(self, "is_decoder", False) else "encoder"
            config = config.for_length(longest_sequence(next(model_configs, None) or self.config, stack))
        self.__class__ = serving_class(type(self), config, self)
        self.replace_projections(config)
        set_norms_aside(self, config)

    @classmethod
    def from_stock(
        cls,
        stock: nn.Module,
        config: LayerConfig,
        example: torch.Tensor | None = None,
        *,
        keeps_all_rows: bool = False,
    ) -> SynthesizerMixin:
        """Build a synthesized layer from a stock module, which stays as it was.

        The two share everything (values, dropout, hooks, train or eval mode) but the query and key projections.

        Args:
            stock: the stock module.
            config: of the synthesizer.
            example: a floating-point tensor of the model, whose dtype and device a quantized module may need.
            keeps_all_rows: whether no projection that stays is cut down to the rows of some heads.

        Raises:
            UnsupportedModelError: for a module that is offloaded, was compiled, or has a forward set on its object.
        """
        require_in_memory(stock, f"A layer of {type(stock).__name__} cannot be patched")
        require_plain_call(stock)
        layer_class = serving_class(cls, config, stock)
        layer = layer_class.from_stock_unchecked(stock, config, example, keeps_all_rows=keeps_all_rows)
        move_hooks(stock, layer)
        return layer

    @classmethod
    def from_stock_unchecked(
        cls,
        stock: nn.Module,
        config: LayerConfig,
        example: torch.Tensor | None = None,
        *,
        keeps_all_rows: bool = False,
    ) -> SynthesizerMixin:
        """`from_stock` with exactly this class, whatever the stock forward computes."""
        layer = cls.__new__(cls)
        layer.__dict__.update(stock.__dict__)
        for registry in ("_modules", "_parameters", "_buffers"):
            layer.__dict__[registry] = dict(stock.__dict__[registry])
        layer.__dict__["keeps_all_rows"] = keeps_all_rows
        layer.replace_projections(config, example)
        set_norms_aside(layer, config)
        for module in layer.modules() if getattr(stock, LOADED, False) else (layer,):
            # A model around the layer must not initialize its modules again. The stock initialization would also look for
            # queries and keys (`models/initialization.py` does that instead).
            module.__dict__[LOADED] = True
        return layer

    @property
    def logit_scaling(self) -> float:
        """The factor of the stock layer's dot products."""
        return float(getattr(self, "scaling", getattr(self, "scale", self.dimensions[2] ** -0.5)))

    @property
    def stock_logit_parameters(self) -> int:
        """The number of parameters of the stock projections that are gone."""
        return self.__dict__["_stock_logit_parameters"]

    @property
    def logit_modules(self) -> list[nn.Module]:
        """The modules that compute the logits now."""
        return [self.synthesizer]

    def projections_to_adapt(self) -> list[str]:
        """The pretrained projections that are still used, except the output projection: by custom, LoRA adapts these."""
        comparing = [name for name, part in self.synthesizers() if isinstance(part, DotProductSynthesizer)]
        return [self.projection_names.value, *(f"{name}.{part}" for name in comparing for part in ("query", "key"))]

    def synthesizers(self) -> Iterator[tuple[str, Synthesizer]]:
        """The synthesizer of each group of heads, with its name in the layer."""
        if isinstance(self.synthesizer, HeadGroups):
            yield from ((f"synthesizer.groups.{name}", group) for name, _, group in self.synthesizer.members())
        else:
            yield "synthesizer", self.synthesizer

    def replace_projections(self, config: LayerConfig, example: torch.Tensor | None = None) -> None:
        """Replace the query and key projections by a synthesizer, on their device and with their dtype.

        Quantized projections may have no dtype of their own: then it is that of `example`, or torch's default.
        """
        projection_names = find_projection_names(self)
        if projection_names is None:
            raise UnsupportedModelError(
                f"{self.stock_class.__name__} names its projections in a way that no layer class knows: {', '.join(self._modules)}."
            )
        self.projection_names = projection_names
        hidden_size = in_features(cast(nn.Module, self._modules[projection_names.fused or projection_names.value]))
        self.__dict__["_dimensions"] = (hidden_size, query_heads(self), head_dim(self))
        device, dtype = self.device_and_dtype(cast(nn.Module, self._modules[self.guard_name]), example)
        synthesizer = self.build(config, device, dtype)
        value = projection_of(self, projection_names, "value") if projection_names.fused else None
        replaced = [cast(nn.Module, self._modules.pop(name)) for name in projection_names.replaced]
        count = sum(parameter.numel() for module in replaced for parameter in module.parameters())
        if value is not None:
            self._modules[projection_names.value] = value
            count -= sum(parameter.numel() for parameter in value.parameters())
        self.__dict__["_stock_logit_parameters"] = count
        self.synthesizer = synthesizer
        self.place_guard(config, device)

    @staticmethod
    def device_and_dtype(projection: nn.Module, example: torch.Tensor | None) -> tuple[torch.device, torch.dtype]:
        """Those of a stock projection; of `example`, or torch's own, for a quantized one that has none."""
        return place_of(projection, torch.empty(0) if example is None else example)

    def build(self, config: LayerConfig, device: torch.device, dtype: torch.dtype) -> Synthesizer:
        """A fresh synthesizer."""
        hidden_size, heads, width = self.dimensions
        with torch.device(device):
            synthesizer = build_synthesizer(config, hidden_size, heads, config.max_length or 0, head_dim=width)
        synthesizer.to(dtype)
        synthesizer.set_causal(bool(getattr(self, "is_causal", False)))
        return self.take_projections(synthesizer).train(self.training)

    def take_projections(self, synthesizer: Synthesizer) -> Synthesizer:
        """Give the stock query and key projections to a synthesizer that uses them; returns the synthesizer."""
        if any(get_variant(part).load_stock is not Synthesizer.load_stock for part in synthesizer.config.parts):
            query, key = (projection_of(self, self.projection_names, name) for name in ("query", "key"))
            synthesizer.load_stock(query=query, key=key, scaling=self.logit_scaling)
        return synthesizer

    def place_guard(self, config: LayerConfig, device: torch.device) -> None:
        """Store a guard under the name of a stock projection that is gone or has moved."""
        self._modules[self.guard_name] = Guard(config, device).train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict with this layer's values must have its synthesizer too, even if missing keys are allowed.

        Trainer allows them when it loads its checkpoints. A stock checkpoint would leave the synthesizer as it is, with no
        more than a warning.
        """
        guard = self._modules[self.guard_name]
        if isinstance(guard, Guard):  # it says better than a missing tensor how the two patches differ
            guard.require_in(state_dict, f"{prefix}{self.guard_name}.")
        names = [name for name in self.state_dict() if name.startswith("synthesizer.")]
        require_tensors(state_dict, prefix, names, beside=f"{self.projection_names.value}.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)
