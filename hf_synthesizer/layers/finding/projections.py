"""Finds the projections, heads and dropout of a stock attention module by the names that Transformers gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...synthesizers.stock_weights import rows_of
from ..refusals import unsupported

SEPARATE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    # query, key, value, and the names of the output projection
    ("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj", "dense", "projection_layer")),
    ("query", "key", "value", ("dense",)),
    ("q_lin", "k_lin", "v_lin", ("out_lin",)),
    ("q", "k", "v", ("o",)),
)
"""Names of separate projections. One more line here serves an attention class whose projections have new names."""
OUTPUT_DROPOUTS = ("resid_dropout", "out_drop", "output_dropout")
"""Names of a dropout after the output projection."""
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
"""Names of the number of tokens that a layer looks back."""


@dataclass(frozen=True)
class ProjectionNames:
    """The names of a module's projections. `output` is None if the module around it projects the output.

    With `fused`, one projection makes queries, keys and values, and `rows(module, total)` gives the rows of its weight for
    each. `value` is then the name of the module that gets the values' rows.
    """

    query: str
    key: str
    value: str
    output: str | None = None
    fused: str | None = None
    rows: Callable[[nn.Module, int], dict[str, torch.Tensor]] | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        """The projections that a layer needs no more if it compares no tokens."""
        return (self.fused,) if self.fused else (self.query, self.key)


def names_of_projections() -> frozenset[str]:
    """All names in `SEPARATE`."""
    return frozenset(name for *names, outputs in SEPARATE for name in (*names, *outputs))


def find_projection_names(module: nn.Module) -> ProjectionNames | None:
    """The names of the projections of a stock attention module; None if they are unknown."""
    names = module._modules
    for query, key, value, outputs in SEPARATE:
        if query in names and key in names and value in names:
            return ProjectionNames(query, key, value, _first(names, outputs))
    for fused, beside, rows in FUSED:
        if fused in names:
            return ProjectionNames(fused, fused, "value", _first(names, beside), fused=fused, rows=rows)
    return None


def any_projection_names(module: nn.Module) -> ProjectionNames:
    """For a layer that keeps the stock forward, with projections of any name: the first one that takes hidden states.

    Raises:
        UnsupportedModelError: for a module without projections.
    """
    for name, projection in module._modules.items():
        if getattr(getattr(projection, "weight", None), "ndim", 0) == 2:
            return ProjectionNames(name, name, name, fused=name)
    raise UnsupportedModelError(
        f"{type(module).__name__} has no projection of its own ({', '.join(module._modules) or 'no modules'}), so that a "
        f"checkpoint of it could not be guarded against stock classes. Patch other layers (layers=…)."
    )


def _first(names: Any, candidates: tuple[str, ...]) -> str | None:
    return next((name for name in candidates if name in names), None)


def _side_by_side(module: nn.Module, total: int) -> dict[str, torch.Tensor]:
    """All queries, then all keys, then all values; where groups of heads share keys and values, these are fewer."""
    width = value_heads(module) * head_dim(module)
    query, key, value = torch.arange(total).split([total - 2 * width, width, width])
    return {"query": query, "key": key, "value": value}


def _head_by_head(module: nn.Module, total: int) -> dict[str, torch.Tensor]:
    """A head's query, key and value, then the next head's."""
    rows = torch.arange(total).view(-1, 3, head_dim(module))
    return {name: rows[:, index].flatten() for index, name in enumerate(("query", "key", "value"))}


FUSED = (
    ("c_attn", ("c_proj",), _side_by_side),
    ("Wqkv", ("Wo", "out_proj"), _side_by_side),
    ("qkv_proj", ("o_proj",), _side_by_side),
    ("query_key_value", ("dense",), _head_by_head),
)


def projection_of(module: nn.Module, projection_names: ProjectionNames, which: str) -> nn.Module:
    """The projection of a stock module that makes its "query", "key" or "value"; as many keys as queries.

    It is the module's own if possible, or a new one with copies of its rows.
    """
    name = (
        projection_names.fused
        or {"query": projection_names.query, "key": projection_names.key, "value": projection_names.value}[which]
    )
    projection = cast(nn.Module, module._modules[name])
    groups = query_heads(module) // value_heads(module)
    if projection_names.rows is None and (which != "key" or groups == 1):
        return projection
    total = out_features(projection)
    rows = torch.arange(total) if projection_names.rows is None else projection_names.rows(module, total)[which]
    if which == "key" and groups > 1:
        rows = rows.view(-1, head_dim(module)).repeat_interleave(groups, dim=0).flatten()
    return rows_of(projection, rows)


def head_rows(module: nn.Module, heads: Sequence[int]) -> torch.Tensor:
    """The rows of a stock projection for these heads."""
    width = head_dim(module)
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def fused_rows(
    module: nn.Module, projection_names: ProjectionNames, which: Sequence[str], heads: Sequence[int]
) -> torch.Tensor:
    """The rows of a fused projection for the `which` ("query", "key", "value") of these heads, in the projection's order."""
    total = out_features(cast(nn.Module, module._modules[cast(str, projection_names.fused)]))
    rows = cast(Callable[..., dict[str, torch.Tensor]], projection_names.rows)(module, total)
    return torch.cat([rows[name].view(-1, head_dim(module))[list(heads)].flatten() for name in which]).sort().values


def head_dim(module: nn.Module) -> int:
    """The width d_h of one head of a stock attention module."""
    return int(_attribute(module, ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")))


def query_heads(module: nn.Module) -> int:
    """The number H of heads of a stock attention module."""
    projection_names = find_projection_names(module)
    if projection_names is not None and projection_names.fused is None:
        heads = out_features(cast(nn.Module, module._modules[projection_names.query])) // head_dim(module)
        if projection_names.output is None:
            return heads
        # The query projection may make a gate too (Qwen3-Next).
        output_heads = in_features(cast(nn.Module, module._modules[projection_names.output])) // head_dim(module)
        return output_heads if heads == 2 * output_heads else heads
    return int(_attribute(module, ("num_heads", "num_attention_heads", "n_heads", "n_head")))


def value_heads(module: nn.Module) -> int:
    """The number of heads of the values: fewer than H if groups of heads share them."""
    projection_names = find_projection_names(module)
    if projection_names is not None and projection_names.fused is None:
        return out_features(cast(nn.Module, module._modules[projection_names.value])) // head_dim(module)
    groups = getattr(module, "num_key_value_groups", 1)
    return query_heads(module) // int(groups)


def dropout_probability(module: nn.Module) -> float:
    """The probability with which a stock attention module drops a weight in training."""
    names = ("attention_dropout", "attn_dropout", "dropout_p", "dropout_prob", "dropout")
    dropout = _attribute(module, names, default=0.0)
    return float(dropout.p if isinstance(dropout, nn.Dropout) else dropout)


def has_window(module: nn.Module) -> bool:
    """Whether a stock attention module, or its config, has a sliding window."""
    config = getattr(module, "config", None)
    return any(getattr(module, name, getattr(config, name, None)) for name in WINDOWS)


def out_features(projection: nn.Module) -> int:
    """The width of a projection's output; `Conv1D` of the GPT models calls it `nf`."""
    return int(_attribute(projection, ("out_features", "nf")))


def in_features(projection: nn.Module) -> int:
    """The width of a projection's input; `Conv1D` of the GPT models calls it `nx`."""
    return int(_attribute(projection, ("in_features", "nx")))


def _attribute(module: nn.Module, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of these attributes of the module, or else of its config.

    Raises:
        UnsupportedModelError: if there is none, and no default.
    """
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None and (isinstance(value, nn.Dropout) or not isinstance(value, nn.Module)):
                return value
    if default is None:
        raise unsupported(
            type(module), f"says its size in a way that no layer class knows: it has none of {', '.join(names)}"
        )
    return default
