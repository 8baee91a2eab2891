"""What synthesized layers have learnt, apart from any input: tables by head, with positions as axes where they have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..layers.finding.attention_layers import find_attention_layers
from ..layers.mixin import SynthesizerMixin
from ..layers.sentence_transformers import model_in
from ..synthesizers.base import Synthesizer
from ..synthesizers.dense import DenseSynthesizer
from ..synthesizers.factorized_dense import FactorizedDenseSynthesizer
from ..synthesizers.mixture import MixtureSynthesizer
from ..synthesizers.salience import SalienceSynthesizer

QUERY, KEY = "query position i", "key position j"


@dataclass(frozen=True)
class Table:
    """One learnt table: `values` (heads, rows, columns), what it is in the formula, and what its axes are.

    `heads` is 1 where all heads share it.
    """

    layer: str
    part: str
    symbol: str
    rows: str
    columns: str
    values: torch.Tensor

    @property
    def is_static(self) -> bool:
        """Whether these are logits of queries and keys, the same whatever the input."""
        return (self.rows, self.columns) == (QUERY, KEY)


def tables_of(model: nn.Module) -> list[Table]:
    """The tables of all synthesized layers of a model, layer by layer, on the processor.

    Raises:
        UnsupportedModelError: for what is no Transformers model.
    """
    attention_layers, _ = find_attention_layers(model_in(model))
    return [
        table
        for attention_layer in attention_layers
        if isinstance(attention_layer.module, SynthesizerMixin)
        for table in _tables(attention_layer.label, attention_layer.module.synthesizer)
    ]


@torch.no_grad()
def _tables(layer: str, synthesizer: Synthesizer) -> Iterator[Table]:
    parts = synthesizer.components() if isinstance(synthesizer, MixtureSynthesizer) else [(None, synthesizer)]
    for _, part in parts:
        for symbol, rows, columns, values in _of(part):
            yield Table(layer, part.variant, symbol, rows, columns, values.detach().float().cpu())


def _of(part: Synthesizer) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    static = part.static_table()
    if static is not None:
        symbol = "R1 · R2ᵀ" if part.variant == "factorized_random" else "R"
        yield symbol, QUERY, KEY, static[: part.table_heads]
    elif isinstance(part, DenseSynthesizer):
        yield "W2", "hidden unit", KEY, part.columns.transpose(-1, -2)  # (H, d_h, N)
        yield "b2", "", KEY, part.bias.unsqueeze(-2)  # (H, 1, N)
    elif isinstance(part, FactorizedDenseSynthesizer):
        yield "WA", "hidden unit", "j mod a", part.inner_weight
        yield "WB", "hidden unit", "j div a", part.outer_weight
    elif isinstance(part, SalienceSynthesizer):
        yield "u", "head", "dimension of x_j", part.worth.weight.unsqueeze(0)  # (1, H, d)


def in_words(table: Table, head: int, length: int) -> str:
    """What a static table makes a head do in a sequence of that length: where it looks, as offsets or as places."""
    weights = table.values[min(head, len(table.values) - 1), :length, :length].softmax(-1)  # (L, L)
    size = weights.shape[-1]
    offsets = {k: float(weights.diagonal(k).mean()) for k in range(1 - size, size) if size - abs(k) > size // 2}
    offset = max(offsets, key=offsets.__getitem__)
    columns = weights.mean(0)
    place = int(columns.argmax())
    even = 1 / size
    if max(offsets[offset], float(columns[place])) < 2 * even:
        return f"Looks at everything about alike: no place and no distance gets more than twice the even share of {even:.1%}."
    if offsets[offset] >= float(columns[place]):
        where = {0: "at itself", 1: "at the next token", -1: "at the token before"}.get(
            offset, f"{abs(offset)} tokens {'on' if offset > 0 else 'back'}"
        )
        return f"Looks mostly {where}: {offsets[offset]:.0%} of its weight on average."
    return (
        f"Looks mostly at position {place}, wherever it stands: {float(columns[place]):.0%} of its weight on average."
    )
