"""The learnt tables of synthesized layers, by head. Some have positions as axes."""

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
    """One learnt table: `values` (heads, rows, columns), its symbol in the formula, and the names of its axes.

    `heads` is 1 if all heads share the table.
    """

    layer: str
    part: str
    symbol: str
    rows: str
    columns: str
    values: torch.Tensor

    @property
    def is_static(self) -> bool:
        """Whether these are logits of queries and keys that do not depend on the input."""
        return (self.rows, self.columns) == (QUERY, KEY)


@torch.no_grad()
def tables_of(model: nn.Module) -> list[Table]:
    """The tables of all synthesized layers of a model, layer by layer, on the CPU.

    Raises:
        UnsupportedModelError: if it is no Transformers model.
    """
    tables = []
    for attention_layer in find_attention_layers(model_in(model))[0]:
        if isinstance(attention_layer.module, SynthesizerMixin):
            synthesizer: Synthesizer = attention_layer.module.synthesizer
            parts = [synthesizer]
            if isinstance(synthesizer, MixtureSynthesizer):
                parts = [part for _, part in synthesizer.components()]
            for part in parts:
                for symbol, rows, columns, values in _tables_of_part(part):
                    values = values.detach().float().cpu()
                    tables.append(Table(attention_layer.label, part.variant, symbol, rows, columns, values))
    return tables


def _tables_of_part(part: Synthesizer) -> Iterator[tuple[str, str, str, torch.Tensor]]:
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


def describe_table(table: Table, head: int, length: int) -> str:
    """A sentence that says where a head with this static table looks in a sequence of this length: an offset or a position."""
    weights = table.values[min(head, len(table.values) - 1), :length, :length].softmax(-1)  # (L, L)
    size = weights.shape[-1]
    offsets = {k: float(weights.diagonal(k).mean()) for k in range(1 - size, size) if size - abs(k) > size // 2}
    offset = max(offsets, key=offsets.__getitem__)
    position = int(weights.mean(0).argmax())
    share, position_share, even = offsets[offset], float(weights.mean(0)[position]), 1 / size
    if max(share, position_share) < 2 * even:
        return f"Looks at everything about alike: no place and no distance gets more than twice the even share of {even:.1%}."
    if share < position_share:
        return (
            f"Looks mostly at position {position}, wherever it stands: {position_share:.0%} of its weight on average."
        )
    far = f"{abs(offset)} tokens {'on' if offset > 0 else 'back'}"
    where = {0: "at itself", 1: "at the next token", -1: "at the token before"}.get(offset, far)
    return f"Looks mostly {where}: {share:.0%} of its weight on average."
