"""Forms of attention logits: synthesizers return them, and `attend` consumes them.

A form keeps the few tensors that define the logits. `materialize()` returns the logits as a (B or 1, H, Lq, Lk) tensor.
Every fast route of `attend` must equal `softmax(materialize() + mask) @ value`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedModelError
from .choice import Choice
from .masks import AttentionMask
from .positions import Positions, rows_in, span
from .tokens import Tokens


class Logits:
    """The base of all forms."""

    query_length: int
    """Lq."""

    def with_mask(self, mask: AttentionMask) -> Logits:
        """The same logits, with what they need to know of the mask."""
        return self

    def materialize(self) -> torch.Tensor:
        """The logits as a tensor of shape (B or 1, H, Lq, Lk)."""
        raise TypeError(f"{type(self).__name__} is an abstract form of logits: it must define materialize()")


class Static(Logits):
    """Logits that are the same for every row of the batch.

    `table`: (H, Lq, Lk). Or two factors, `table` (H, Lq, k) and `keys` (H, Lk, k), for the logits `table · keysᵀ`.
    """

    def __init__(self, table: torch.Tensor, keys: torch.Tensor | None = None):
        self.table = table
        self.keys = keys
        self.query_length = table.shape[-2]

    def materialize(self) -> torch.Tensor:
        logits = self.table if self.keys is None else self.table @ self.keys.transpose(-1, -2)
        return logits.unsqueeze(0)  # (1, H, Lq, Lk)


class StaticWeights(Logits):
    """Static logits given by their softmax: attention weights, up to one factor for each row.

    `weights`: (H, Lq, Lk), or a pair of factors (H, Lq, r), (H, r, Lk) whose product they are. `complete` says that
    each row sums to 1. `causal` says that a row has weights only for its past. `spread` is an upper bound of max − min
    over the logarithms of a row's weights.
    """

    def __init__(
        self, weights: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *, complete: bool, causal: bool, spread: float
    ):
        self.weights = weights
        self.complete = complete
        self.causal = causal
        self.spread = spread
        self.query_length = (weights if isinstance(weights, torch.Tensor) else weights[0]).shape[-2]

    def materialize(self) -> torch.Tensor:
        weights = self.weights if isinstance(self.weights, torch.Tensor) else self.weights[0] @ self.weights[1]
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        # A product of factors may round small weights to 0, and a row of only −∞ has no softmax.
        least = 0.0 if self.causal else torch.finfo(weights.dtype).tiny
        return weights.clamp(min=least).log().unsqueeze(0)  # (1, H, Lq, Lk)


class Explicit(Logits):
    """Logits as a tensor, without further structure. `logits`: (B or 1, H, Lq, Lk)."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits
        self.query_length = logits.shape[-2]

    def materialize(self) -> torch.Tensor:
        return self.logits


class LowRank(Logits):
    """`query · keyᵀ + key_bias`.

    `query`: (B, H, Lq, r), `key`: (B or 1, H, Lk, r), `key_bias`: (B or 1, H, Lk) or None.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, key_bias: torch.Tensor | None = None):
        self.query = query
        self.key = key
        self.key_bias = key_bias
        self.query_length = query.shape[-2]

    def scaled(self, weight: torch.Tensor) -> LowRank:
        """`weight` (H,) times these logits."""
        bias = None if self.key_bias is None else self.key_bias * weight.to(self.key_bias.dtype)[:, None]
        return LowRank(self.query * weight.to(self.query.dtype)[:, None, None], self.key, bias)

    def materialize(self) -> torch.Tensor:
        logits = self.query @ self.key.transpose(-1, -2)  # (B, H, Lq, Lk)
        return logits if self.key_bias is None else logits + self.key_bias.unsqueeze(-2)


class Sparse(Logits):
    """`scaling · query · keyᵀ` for the keys that a query chooses, and −∞ for all others.

    `query`: (B, H, Lq, r), `key`: (B, H, Lk, r). `choice` is the rule that chooses keys. It must not choose padding, so
    it needs the mask: `with_chosen_keys(mask)` applies it. Query i has the index `start + i` among the keys. `causal`
    says that the layer is a decoder's, with or without a causal mask. `known_positions` are the tokens' positions if
    the layer has a window; without them, positions count from a row's first visible token.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float,
        choice: Choice,
        start: int | torch.Tensor = 0,
        causal: bool = False,
        known_positions: Positions | None = None,
    ):
        self.known_positions = known_positions
        self.query = query
        self.key = key
        self.scaling = scaling
        self.choice = choice
        self.start = start
        self.causal = causal
        self.query_length = query.shape[-2]

    def with_chosen_keys(self, mask: AttentionMask) -> tuple[LowRank, AttentionMask]:
        """The logits of all pairs, and `mask` restricted to the chosen keys. Queries at padding see no key.

        Raises:
            UnsupportedModelError: if the mask is causal and the choice needs the whole sequence.
        """
        causal = self.require_direction(mask)
        tokens = Tokens.of(
            mask, self.query_length, self.key.shape[-2], self.start, self.key.device, self.known_positions
        )
        keep = self.choice.chosen(self.query, self.key, tokens, causal)
        visible = mask.visible(self.query_length, self.key.shape[-2], keep.device)
        if visible is not None:
            keep = keep & visible
        queries = tokens.queries(keep.device)
        if queries is not None:
            keep = keep & queries[:, None, :, None]
        return LowRank(self.query * self.scaling, self.key), AttentionMask(keep, mask.bias)

    def require_direction(self, mask: AttentionMask) -> bool:
        """Whether queries see only the past.

        Raises:
            UnsupportedModelError: if they do, and the choice needs the whole sequence.
        """
        causal = self.causal or mask.causal_offset is not None
        if causal and not self.choice.causal:
            raise UnsupportedModelError(
                "This attention chooses its keys over the whole sequence, which a causal layer does not see. Use "
                "sparse_strided or sparse_fixed here, which choose by position, or a variant that chooses no keys."
            )
        return causal

    def materialize(self) -> torch.Tensor:
        logits, mask = self.with_chosen_keys(AttentionMask())
        return logits.materialize().masked_fill(~mask.keep, float("-inf"))  # type: ignore[operator]


class Tiled(Logits):
    """A row-wise outer product: `logits[…, j] = inner[…, j mod a] · outer[…, j div a]`.

    `inner`: (B, H, Lq, a), `outer`: (B, H, Lq, b), the first `key_length` ≤ a·b columns of the product are the logits.
    """

    def __init__(self, inner: torch.Tensor, outer: torch.Tensor, key_length: int):
        self.inner = inner
        self.outer = outer
        self.key_length = key_length
        self.query_length = inner.shape[-2]

    def materialize(self) -> torch.Tensor:
        product = self.outer.unsqueeze(-1) * self.inner.unsqueeze(-2)  # (B, H, Lq, b, a)
        return span(product.flatten(-2), 0, self.key_length, dim=-1)


class Placed(Logits):
    """Logits gathered by position: each row of the batch has its own positions.

    `form` is a `Static` table (H or 1, N, N), with `logits[b, h, i, j] = table[h, query[b, i], key[b, j]]`; or a
    `Tiled` form of N columns, whose queries are in order, with `logits[b, h, i, j] = form[b, h, i, key[b, j]]`. `key`:
    (B or 1, Lk), `query`: (B or 1, Lq), None beside `Tiled`.
    """

    def __init__(self, form: Static | Tiled, key: torch.Tensor, query: torch.Tensor | None = None):
        self.form = form
        self.key = key
        self.query = query
        self.query_length = form.query_length if query is None else query.shape[-1]

    def materialize(self) -> torch.Tensor:
        if isinstance(self.form, Tiled):
            return place_columns(self.form.inner, self.form.outer, self.key)
        return place_table(self.form.table, self.query, self.key)  # type: ignore[arg-type]


def place_table(table: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`table[h, query[b, i], key[b, j]]`, (B, H, Lq, Lk), for a table (H, N, N)."""
    rows = table[:, query].transpose(0, 1)  # (B, H, Lq, N)
    return _gather_columns(rows, key)


def place_columns(inner: torch.Tensor, outer: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The columns `key[b, j]` of the outer product of inner (B, H, Lq, a) and outer (B, H, Lq, b): (B, H, Lq, Lk)."""
    return _gather_columns((outer.unsqueeze(-1) * inner.unsqueeze(-2)).flatten(-2), key)


def _gather_columns(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    batch = rows_in(rows, key)
    columns = key[:, None, None, :].expand(batch, *rows.shape[1:-1], -1)
    return rows.expand(batch, -1, -1, -1).gather(-1, columns)


class KeyBias(Logits):
    """One number for each key, the same for all queries. `bias`: (B, H, 1, Lk)."""

    def __init__(self, bias: torch.Tensor, query_length: int):
        self.bias = bias
        self.query_length = query_length

    def materialize(self) -> torch.Tensor:
        return self.bias.expand(-1, -1, self.query_length, -1)


class Sum(Logits):
    """A weighted sum of forms: `Σ_c weight_c[h] · logits_c`. A weight is a tensor (H,), or None for 1."""

    def __init__(self, terms: list[tuple[torch.Tensor | None, Logits]]):
        self.terms = terms
        self.query_length = max(term.query_length for _, term in terms)

    def with_mask(self, mask: AttentionMask) -> Sum:
        return Sum([(weight, term.with_mask(mask)) for weight, term in self.terms])

    def materialize(self) -> torch.Tensor:
        total: torch.Tensor | None = None
        for weight, logits in self.terms:
            term = logits.materialize()
            if weight is not None:
                term = term * weight.to(term.dtype)[:, None, None]
            total = term if total is None else total + term
        if total is None:
            raise ValueError("a Sum of logits needs at least one term")
        return total


def weighted(weight: torch.Tensor | None, logits: Logits) -> tuple[torch.Tensor | None, Logits]:
    """A term of a `Sum`. Low-rank logits are scaled here, so that autograd keeps one scaled query."""
    if weight is not None and isinstance(logits, LowRank):
        return None, logits.scaled(weight)
    return weight, logits


class HeadPartition:
    """A partition of a layer's heads 0 … H − 1 into `groups`, tuples of increasing head numbers.

    A tensor is split once, at the ends of runs of neighbouring heads, so that nothing is copied twice.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]]):
        self.groups = tuple(groups)
        self.runs = self._runs()
        """(group, number of heads) of each run of neighbouring heads of one group, in the order of heads."""

    def _runs(self) -> list[tuple[int, int]]:
        owner = {head: group for group, heads in enumerate(self.groups) for head in heads}
        runs: list[tuple[int, int]] = []
        for head in sorted(owner):
            if runs and runs[-1][0] == owner[head]:
                runs[-1] = (owner[head], runs[-1][1] + 1)
            else:
                runs.append((owner[head], 1))
        return runs

    def split(self, tensor: torch.Tensor, dim: int = 1) -> list[torch.Tensor]:
        """Each group's heads of a tensor. A tensor with one head goes to every group as it is."""
        if tensor.shape[dim] == 1:
            return [tensor] * len(self.groups)
        cuts = tensor.split([length for _, length in self.runs], dim=dim)
        parts: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for (group, _), cut in zip(self.runs, cuts, strict=True):
            parts[group].append(cut)
        return [group[0] if len(group) == 1 else torch.cat(group, dim=dim) for group in parts]

    def join(self, tensors: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The inverse of `split`: all heads in order."""
        cuts = [
            iter(tensor.split([length for group, length in self.runs if group == number], dim=dim))
            for number, tensor in enumerate(tensors)
        ]
        return torch.cat([next(cuts[group]) for group, _ in self.runs], dim=dim)


class Grouped(Logits):
    """Logits with a different form for each group of heads: `logits[g]` belongs to the heads `heads.groups[g]`."""

    def __init__(self, heads: HeadPartition, logits: Sequence[Logits]):
        self.heads = heads
        self.logits = list(logits)
        self.query_length = max(group.query_length for group in logits)

    def materialize(self) -> torch.Tensor:
        tables = [group.materialize() for group in self.logits]
        batch = rows_in(*tables)
        dtype = tables[0].dtype
        for table in tables[1:]:
            dtype = torch.promote_types(dtype, table.dtype)
        return self.heads.join([table.to(dtype).expand(batch, -1, -1, -1) for table in tables])
