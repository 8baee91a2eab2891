"""`plot_attention`: what heads look at, layer by layer, with stock attention and the difference beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..pictures.recorded import LayerWeights, record
from .figures import CELL, chosen, draw_map, label_scale, label_tokens

MOST = 4
"""Layers and heads that are shown where nobody says which."""


def plot_attention(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    teacher: PreTrainedModel | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    row: int = 0,
) -> Figure:
    """Attention weights as maps: a column for each head, a row for each layer; who looks goes down, what is looked at right.

    With a teacher each layer has three rows: the model, the teacher, and the difference: purple is more than the
    teacher gives, orange less. The number over a map is the weight that its darkest colour stands for.

    Args:
        model: a stock or a patched model.
        inputs: of the model, such as a tokenizer returns.
        teacher: the stock model.
        tokenizer: whose tokens are the labels; numbers if None.
        layers: which, counted over all stacks; four of them if None.
        heads: which; four of them if None.
        row: of the batch.

    Raises:
        InvalidConfigError: for a layer or a head that there is not.
        UnsupportedModelError: for a model that gives no weights.
    """
    recorded = record(model, inputs)
    taught = {layer.label: layer for layer in record(teacher, inputs)} if teacher is not None else {}
    shown = [recorded[index] for index in chosen(layers, len(recorded), MOST, "layer")]
    columns = chosen(heads, recorded[0].weights.shape[1], MOST, "head")
    lines = [line for layer in shown for line in _lines(layer, taught.get(layer.label), row)]

    length = recorded[0].weights.shape[-1]
    tokens = [str(place) for place in range(length)]
    if tokenizer is not None:
        tokens = list(tokenizer.convert_ids_to_tokens(inputs["input_ids"][row].tolist()))[:length]
    size = max(CELL, min(3.2, 0.11 * length))
    figure = Figure((size * len(columns) + 2.2, size * len(lines) + 1.0), layout="constrained")
    axes = figure.subplots(len(lines), len(columns), squeeze=False)
    for place, (name, weights, signed, tops) in enumerate(lines):
        for column, head in enumerate(columns):
            axis = axes[place][column]
            draw_map(axis, weights[head], signed=signed, top=float(tops[head]))
            label_tokens(axis, tokens[: weights.shape[-1]], left=column == 0, below=place == len(lines) - 1)
            label_scale(axis, float(tops[head]), signed=signed)
            if place == 0:
                axis.set_title(f"head {head}", fontsize=9)
            if column == 0:
                axis.set_ylabel(name, fontsize=8)
    return figure


def _lines(
    layer: LayerWeights, stock: LayerWeights | None, row: int
) -> list[tuple[str, torch.Tensor, bool, torch.Tensor]]:
    """Name, weights (H, L, L), whether they have signs, and the ends of their scales (H,): that of both models is one."""
    ours = layer.weights[row]
    if stock is None:
        return [(f"{layer.label}\n{layer.attention}", ours, False, ours.amax((-1, -2)))]
    theirs = stock.weights[row]
    tops = torch.maximum(ours, theirs).amax((-1, -2))
    difference = ours - theirs
    return [
        (f"{layer.label}\n{layer.attention}", ours, False, tops),
        (f"{layer.label}\n{stock.attention}", theirs, False, tops),
        (f"{layer.label}\ndifference", difference, True, difference.abs().amax((-1, -2))),
    ]
