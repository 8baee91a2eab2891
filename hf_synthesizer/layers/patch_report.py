"""Reports what a patch changed, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..synthesizers.parameters import count_parameters
from .finding.attention_layers import AttentionLayers, find_attention_layers
from .finding.projections import find_projection_names, projection_of
from .mixin import SynthesizerMixin
from .sentence_transformers import model_in


@dataclass(frozen=True)
class LayerReport:
    """One attention layer. `before` and `after` count the trainable parameters of its logits, with biases."""

    name: str
    variant: str
    before: int
    after: int
    note: str


@dataclass(frozen=True)
class PatchReport:
    """Every attention layer of a model, and the model's parameters before and after. Prints as a table."""

    layers: tuple[LayerReport, ...]
    parameters_before: int
    parameters_after: int

    @property
    def swapped(self) -> tuple[LayerReport, ...]:
        """The synthesized layers."""
        return tuple(layer for layer in self.layers if layer.variant != "stock")

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """The layers that stayed as they were; `note` says why."""
        return tuple(layer for layer in self.layers if layer.variant == "stock")

    def __str__(self) -> str:
        rows = [("layer", "attention", "logit parameters", "note")]
        for layer in self.layers:
            change = f"{layer.before:,} → {layer.after:,}" if layer.variant != "stock" else f"{layer.before:,}"
            rows.append((layer.name, layer.variant, change, layer.note))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        share = self.parameters_after / max(self.parameters_before, 1) - 1
        summary = (
            f"{len(self.swapped)} of {len(self.layers)} attention layers synthesized; model parameters "
            f"{self.parameters_before:,} → {self.parameters_after:,} ({share:+.1%})"
        )
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], summary])


def patch_report(model: PreTrainedModel) -> PatchReport:
    """Which layers were swapped, parameters before and after, which layers stayed and why.

    Also works on a stock model, and on the model in a SentenceTransformer.

    Raises:
        UnsupportedModelError: for a model that no model type serves.
    """
    model = model_in(model)
    return report_layers(model, find_attention_layers(model))


def report_layers(model: PreTrainedModel, attention_layers: AttentionLayers) -> PatchReport:
    """`patch_report` of a model whose attention layers the caller has found."""
    layers = []
    for attention_layer in attention_layers.layers:
        module = attention_layer.module
        if isinstance(module, SynthesizerMixin):
            config = module.synthesizer.config
            settings = {} if config.max_length is None else {"max_length": config.max_length}
            note = ", ".join(f"{key}={value}" for key, value in {**settings, **config.non_default()}.items())
            note = note or "any length"
            before, after = module.stock_logit_parameters, sum(map(count_parameters, module.logit_modules))
            layers.append(LayerReport(attention_layer.name, config.variant, before, after, note))
        else:
            count = _projection_parameters(module)
            layers.append(LayerReport(attention_layer.name, "stock", count, count, "not selected"))
    for name in attention_layers.cross_attention:
        count = _projection_parameters(model.get_submodule(name))
        layers.append(
            LayerReport(name, "stock", count, count, "cross-attention stays: synthesizers replace self-attention")
        )
    after = count_parameters(model, trainable_only=False)
    change = sum(layer.after - layer.before for layer in layers)
    return PatchReport(tuple(layers), after - change, after)


def _projection_parameters(stock: nn.Module) -> int:
    projection_names = find_projection_names(stock)
    if projection_names is None:
        return 0
    projections = [stock.get_submodule(name) for name in projection_names.replaced]
    count = sum(count_parameters(projection, trainable_only=False) for projection in projections)
    if projection_names.fused:
        count -= count_parameters(projection_of(stock, projection_names, "value"), trainable_only=False)
    return count
