"""`plot_attention`: attention maps of layers and heads, with those of a teacher and their difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidConfigError
from .figures import CELL, choose_indices, draw_map, label_scale, label_tokens
from .recorded import LayerWeights, record, tokens_read, words_of

MOST = 4
"""The number of layers and heads that are shown by default."""
EVEN = 2.5
"""A map's darkest colour stands for at least so many even shares, so even attention is pale."""


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
    """Draw attention weights as maps, a row for each layer and a column for each head. Padding is left out.

    In a map a row is the token that looks (the query), and a column the token that it looks at (the key). The number over a map
    is the weight of its darkest colour. With a teacher each layer has three rows on one scale: the model, the teacher, and the
    difference (purple where the model looks more, orange where it looks less).

    Args:
        model: a stock or a patched model.
        inputs: the model's inputs, as a tokenizer returns them.
        teacher: the stock model.
        tokenizer: names the tokens; their positions are shown if None.
        layers: indices of layers, counted over all stacks; four layers if None.
        heads: indices of heads; four heads if None.
        row: the row of the batch.

    Raises:
        InvalidConfigError: for a layer, a head or a row that does not exist.
        UnsupportedModelError: for a model that returns no weights.
    """
    if not 0 <= row < len(inputs["input_ids"]):
        raise InvalidConfigError(f"There is no row {row}: the batch has {len(inputs['input_ids'])}.")
    recorded = record(model, inputs)
    stock = {layer.label: layer for layer in record(teacher, inputs)} if teacher is not None else {}
    num_heads = recorded[0].weights.shape[1]
    shown = [recorded[index] for index in choose_indices(layers, len(recorded), MOST, "layer")]
    columns = choose_indices(heads, num_heads, MOST, "head")
    tokens = {layer.label: tokens_read(model, inputs, layer.label.partition(".")[0], row) for layer in shown}
    lines = [
        (layer.label, *line)
        for layer in shown
        for line in _lines(layer, stock.get(layer.label), row, tokens[layer.label])
    ]

    size = max(CELL, min(3.2, 0.11 * max(map(len, tokens.values()))))
    figure = Figure((size * len(columns) + 2.2, size * len(lines) + 1.4), layout="constrained")
    axes = figure.subplots(len(lines), len(columns), squeeze=False)
    for place, (label, name, weights, signed, tops) in enumerate(lines):
        positions, ids = zip(*tokens[label], strict=True)
        names = list(map(str, positions)) if tokenizer is None else words_of(tokenizer, list(ids))
        below = place + 1 == len(lines) or tokens[lines[place + 1][0]] != tokens[label]  # the last with these tokens
        for column, head in enumerate(columns):
            axis = axes[place][column]
            draw_map(axis, weights[head], signed=signed, top=float(tops[head]))
            label_tokens(axis, names, left=column == 0, below=below, inches=size)
            label_scale(axis, float(tops[head]), signed=signed)
            if place == 0:
                axis.set_title(f"head {head}", fontsize=9)
            if column == 0:
                axis.set_ylabel(name, fontsize=8)
    figure.supxlabel("what is looked at", fontsize=8)
    figure.supylabel("who looks", fontsize=8)
    title = f"{len(shown)} of {len(recorded)} layers, {len(columns)} of {num_heads} heads"
    if teacher is not None:
        title += "\ndifference: purple where the model looks more than the teacher, orange where less"
    figure.suptitle(title, fontsize=8)
    return figure


def _lines(
    layer: LayerWeights, stock: LayerWeights | None, row: int, tokens: Sequence[tuple[int, int]]
) -> list[tuple[str, torch.Tensor, bool, torch.Tensor]]:
    """Name, weights (H, L, L), whether they have signs, and the ends of the scales (H,), which both models share."""
    keep = torch.tensor([position for position, _ in tokens])
    weights = [one.weights[row][:, keep][:, :, keep] for one in (layer, stock) if one is not None]
    tops = torch.stack([one.amax((-1, -2)) for one in weights]).amax(0).clamp(min=min(EVEN / len(keep), 1.0))
    lines = [(f"{layer.label}\n{layer.attention}", weights[0], False, tops)]
    if stock is not None:
        lines.append((f"{layer.label}\nteacher", weights[1], False, tops))
        lines.append((f"{layer.label}\ndifference", weights[0] - weights[1], True, tops))
    return lines
