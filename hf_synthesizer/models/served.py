"""How each patched layer is served: with a forward of ours or the stock forward, and what became of the stock projections.

The code of the installed Transformers decides this, and another release may decide otherwise. The tensors of the two kinds
differ, so a checkpoint says it, and is loaded as it was saved or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from ..errors import CheckpointMismatchError, UnsupportedModelError
from ..layers import find_layer_class, synthesizer_class
from ..layers.finding.attention_layers import AttentionLayer
from ..layers.guard import Guard
from ..layers.mixin import SynthesizerMixin
from ..layers.stock_forward import StockForwardLayer
from ..synthesizers.config import LayerConfig

logger = logging.get_logger(__name__)

FORWARDS = ("own", "stock")
PLACE = "_place_at_patch"
"""An attribute of attention layers: the name and index that the layer had when the model was patched. A user may drop layers later."""


@dataclass(frozen=True)
class Served:
    """How a layer is served.

    Attributes:
        forward: `"own"` for a layer class, `"stock"` for a layer that keeps the stock forward.
        gone: the stock projections that the layer no longer has.
        cut: the stock projections that keep the rows of some heads alone.
    """

    forward: str
    gone: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    @classmethod
    def of(cls, stock: nn.Module, layer: SynthesizerMixin) -> Served:
        """How this layer is served, which was built from this stock module."""
        keeps_stock_forward = isinstance(layer, StockForwardLayer)
        modules = {name: module for name, module in layer._modules.items() if not isinstance(module, Guard)}
        modules |= dict(layer.get_submodule("stock").named_children()) if keeps_stock_forward else {}
        before = {name for name, module in stock._modules.items() if module is not None}
        cut = [name for name in before & modules.keys() if _shape(stock._modules[name]) != _shape(modules[name])]
        return cls(
            "stock" if keeps_stock_forward else "own", tuple(sorted(before - modules.keys())), tuple(sorted(cut))
        )

    @classmethod
    def from_json(cls, data: Any) -> Served:
        """The inverse of `to_json`.

        Raises:
            TypeError: for anything else.
        """
        if not isinstance(data, Mapping) or data.get("forward") not in FORWARDS:
            raise TypeError(f"a layer is served by a 'forward' of {' or '.join(map(repr, FORWARDS))}, not by {data!r}")
        return cls(data["forward"], *(tuple(map(str, data.get(name, ()))) for name in ("gone", "cut")))

    def to_json(self) -> dict[str, Any]:
        """For `config.json`."""
        lists = {name: list(names) for name, names in (("gone", self.gone), ("cut", self.cut)) if names}
        return {"forward": self.forward, **lists}

    def __str__(self) -> str:
        words = ["a forward of its own" if self.forward == "own" else "the stock forward"]
        words += [f"without {', '.join(self.gone)}"] if self.gone else []
        words += [f"with some rows of {', '.join(self.cut)}"] if self.cut else []
        return ", ".join(words)


def build_layer(
    attention_layer: AttentionLayer,
    config: LayerConfig,
    example: torch.Tensor | None,
    saved: Served | None = None,
    saved_by: str | None = None,
) -> SynthesizerMixin:
    """Build the synthesized layer of a stock layer.

    Args:
        attention_layer: the stock layer.
        config: of its synthesizer.
        example: a floating-point tensor of the model.
        saved: how a checkpoint's layer is served; None for a patch.
        saved_by: the version of Transformers that saved the checkpoint, if known.

    Raises:
        CheckpointMismatchError: if the installed Transformers does not allow to serve the layer as it was saved.
    """
    stock = type(attention_layer.module)
    forward = None if saved is None else saved.forward
    cls = synthesizer_class(stock, keeps_stock_forward=forward == "stock", as_saved=forward == "own")
    keeps_all_rows = saved is not None and not saved.cut
    try:
        layer = cls.from_stock(attention_layer.module, config, example, keeps_all_rows=keeps_all_rows)
    except UnsupportedModelError as error:
        if saved is None:
            raise
        raise _other_release(attention_layer, saved, f"that is refused here: {error}", saved_by) from error
    served = Served.of(attention_layer.module, layer)
    if saved is not None and served != saved:
        raise _other_release(attention_layer, saved, f"here it would be served by {served}", saved_by)
    if forward == "own" and find_layer_class(stock) is None:
        logger.warning_once(
            f"The forward of {stock.__name__} in transformers {transformers.__version__} uses names that it did not when this "
            f"checkpoint was saved (by transformers {saved_by}). Its layers are served as they were, by a forward of their own."
        )
    layer.__dict__["served"] = served
    return layer


def _other_release(
    attention_layer: AttentionLayer, saved: Served, reason: str, saved_by: str | None
) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"config.json says that layer {attention_layer.label!r} was served by {saved}, but {reason}. Load it with the transformers that "
        f"saved it ({saved_by or 'see transformers_version in config.json'}; installed is {transformers.__version__}), or patch "
        f"the base model again."
    )


def _shape(module: nn.Module | None) -> Any:
    return getattr(getattr(module, "weight", None), "shape", None)
