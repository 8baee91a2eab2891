"""Where a stock attention module keeps its projections, its heads and its dropout: found by the names Transformers uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...synthesizers.stock_weights import rows_of

SEPARATE = (
    # query, key, value, and the names that the output projection may have beside them
    ("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj", "dense", "projection_layer")),
    ("query", "key", "value", ("dense",)),
    ("q_lin", "k_lin", "v_lin", ("out_lin",)),
    ("q", "k", "v", ("o",)),
)
OUTPUT_DROPOUTS = ("resid_dropout", "out_drop", "output_dropout")
"""What some modules call a dropout behind their output projection."""
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
"""What models call how far a layer looks back."""


@dataclass(frozen=True)
class ProjectionNames:
    """The names of a module's projections. `output` is None where the module around it projects.

    With `fused`, one projection makes queries, keys and values, and `rows(module, total)` names the rows of its weight that
    make each (`value` is then the name that the values' rows get as a module of their own).
    """

    query: str
    key: str
    value: str
    output: str | None = None
    fused: str | None = None
    rows: Callable[[nn.Module, int], dict[str, torch.Tensor]] | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        """The projections that a layer which compares nothing does without."""
        return (self.fused,) if self.fused else (self.query, self.key)


def find_projection_names(module: nn.Module) -> ProjectionNames | None:
    """The names of the projections of a stock attention module, or None where its names are unknown."""
    names = module._modules
    for query, key, value, outputs in SEPARATE:
        if query in names and key in names and value in names:
            return ProjectionNames(query, key, value, _first(names, outputs))
    for fused, beside, rows in FUSED:
        if fused in names:
            return ProjectionNames(fused, fused, "value", _first(names, beside), fused=fused, rows=rows)
    return None


def any_projection_names(module: nn.Module) -> ProjectionNames:
    """For a module that keeps its own forward, whatever its projections are called: the first one that takes hidden states.

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
    own = value_heads(module) * head_dim(module)
    rows = torch.arange(total)
    return {"query": rows[: total - 2 * own], "key": rows[total - 2 * own : total - own], "value": rows[total - own :]}


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
    """The projection of a stock module that makes its "query", "key" or "value"; keys as many as there are queries.

    It is the module's own where that is possible; else a new one with copies of its rows.
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
    """The rows of a projection of a stock attention module that make these heads."""
    width = head_dim(module)
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def fused_rows(
    module: nn.Module, projection_names: ProjectionNames, which: Sequence[str], heads: Sequence[int]
) -> torch.Tensor:
    """The rows of a fused projection that make the `which` ("query", "key", "value") of these heads, in the projection's order."""
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
        # The queries' projection may make a gate as well (Qwen3-Next).
        mixed = in_features(cast(nn.Module, module._modules[projection_names.output])) // head_dim(module)
        return mixed if heads == 2 * mixed else heads
    return int(_attribute(module, ("num_heads", "num_attention_heads", "n_heads", "n_head")))


def value_heads(module: nn.Module) -> int:
    """How many heads the values of a stock attention module have: fewer than H where groups of heads share them."""
    projection_names = find_projection_names(module)
    if projection_names is not None and projection_names.fused is None:
        return out_features(cast(nn.Module, module._modules[projection_names.value])) // head_dim(module)
    groups = getattr(module, "num_key_value_groups", 1)
    return query_heads(module) // int(groups)


def dropout_probability(module: nn.Module) -> float:
    """With which probability a stock attention module drops a weight in training."""
    found = _attribute(
        module, ("attention_dropout", "attn_dropout", "dropout_p", "dropout_prob", "dropout"), default=0.0
    )
    return float(found.p if isinstance(found, nn.Dropout) else found)


def has_window(module: nn.Module) -> bool:
    """Whether a stock attention module may hide tokens that are far behind, as it says itself, or else its config."""
    config = getattr(module, "config", None)
    return any(getattr(module, name, getattr(config, name, None)) for name in WINDOWS)


def out_features(projection: nn.Module) -> int:
    """How many numbers a projection makes; `Conv1D` of the GPT models calls it `nf`."""
    return int(_attribute(projection, ("out_features", "nf")))


def in_features(projection: nn.Module) -> int:
    """How many numbers a projection takes; `Conv1D` of the GPT models calls it `nx`."""
    return int(_attribute(projection, ("in_features", "nx")))


def _attribute(module: nn.Module, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of these attributes that the module, or its config, has.

    Raises:
        UnsupportedModelError: where there is none, and no default.
    """
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(holder, name, None)
            if found is not None and not (isinstance(found, nn.Module) and not isinstance(found, nn.Dropout)):
                return found
    if default is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} says its size in a way that no layer class knows: it has none of {', '.join(names)}. Patch other "
            f"layers (layers=…), or register a layer class for this class."
        )
    return default
