"""`plot_attention`: what heads look at, layer by layer, with stock attention and the difference beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidConfigError
from .figures import CELL, chosen, draw_map, label_scale, label_tokens
from .recorded import LayerWeights, read_by, record, words_of

MOST = 4
"""Layers and heads that are shown where nobody says which."""
EVEN = 2.5
"""The least that a map's darkest colour stands for, in even shares: so attention to everything alike is pale."""


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
    teacher gives, orange less, on the same scale. The number over a map is the weight that its darkest colour stands for.
    Padding is left out.

    Args:
        model: a stock or a patched model.
        inputs: of the model, such as a tokenizer returns.
        teacher: the stock model.
        tokenizer: whose tokens are the labels; numbers if None.
        layers: which, counted over all stacks; four of them if None.
        heads: which; four of them if None.
        row: of the batch.

    Raises:
        InvalidConfigError: for a layer, a head or a row that there is not.
        UnsupportedModelError: for a model that gives no weights.
    """
    if not 0 <= row < len(inputs["input_ids"]):
        raise InvalidConfigError(f"There is no row {row}: the batch has {len(inputs['input_ids'])}.")
    recorded = record(model, inputs)
    taught = {layer.label: layer for layer in record(teacher, inputs)} if teacher is not None else {}
    shown = [recorded[index] for index in chosen(layers, len(recorded), MOST, "layer")]
    columns = chosen(heads, recorded[0].weights.shape[1], MOST, "head")
    stacks = {layer.label: read_by(model, inputs, layer.label.partition(".")[0], row) for layer in shown}
    lines = [
        (layer.label, *line)
        for layer in shown
        for line in _lines(layer, taught.get(layer.label), row, stacks[layer.label])
    ]

    length = max(len(read) for read in stacks.values())
    size = max(CELL, min(3.2, 0.11 * length))
    figure = Figure((size * len(columns) + 2.2, size * len(lines) + 1.4), layout="constrained")
    axes = figure.subplots(len(lines), len(columns), squeeze=False)
    for place, (label, name, weights, signed, tops) in enumerate(lines):
        read = stacks[label]
        tokens = [str(number) for number, _ in read]
        if tokenizer is not None:
            tokens = words_of(tokenizer, [token for _, token in read])
        last = place + 1 == len(lines) or stacks[lines[place + 1][0]] != read  # of those that read the same
        for column, head in enumerate(columns):
            axis = axes[place][column]
            draw_map(axis, weights[head], signed=signed, top=float(tops[head]))
            label_tokens(axis, tokens, left=column == 0, below=last, inches=size)
            label_scale(axis, float(tops[head]), signed=signed)
            if place == 0:
                axis.set_title(f"head {head}", fontsize=9)
            if column == 0:
                axis.set_ylabel(name, fontsize=8)
    figure.supxlabel("what is looked at", fontsize=8)
    figure.supylabel("who looks", fontsize=8)
    said = f"{len(shown)} of {len(recorded)} layers, {len(columns)} of {recorded[0].weights.shape[1]} heads"
    if teacher is not None:
        said += "\ndifference: purple where the model looks more than the teacher, orange where less"
    figure.suptitle(said, fontsize=8)
    return figure


def _lines(
    layer: LayerWeights, stock: LayerWeights | None, row: int, read: Sequence[tuple[int, int]]
) -> list[tuple[str, torch.Tensor, bool, torch.Tensor]]:
    """Name, weights (H, L, L), whether they have signs, and the ends of their scales (H,): that of both models is one."""
    keep = torch.tensor([number for number, _ in read])
    ours = layer.weights[row][:, keep][:, :, keep]
    even = torch.full((len(ours),), EVEN / len(keep)).clamp(max=1)
    if stock is None:
        return [(f"{layer.label}\n{layer.attention}", ours, False, torch.maximum(ours.amax((-1, -2)), even))]
    theirs = stock.weights[row][:, keep][:, :, keep]
    tops = torch.maximum(torch.maximum(ours, theirs).amax((-1, -2)), even)
    return [
        (f"{layer.label}\n{layer.attention}", ours, False, tops),
        (f"{layer.label}\nteacher", theirs, False, tops),
        (f"{layer.label}\ndifference", ours - theirs, True, tops),
    ]
