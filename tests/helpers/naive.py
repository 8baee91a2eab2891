"""Attention written out as loops, from the formulas and not from the code: what every variant is tested against."""

from __future__ import annotations

import math

import numpy as np

from tests.helpers import naive_choices

SHARED = ("sparse_strided", "sparse_fixed", "lsh_simple", "alsh_simple", "alsh_xbox", "alsh_sign", "routing")
"""The variants whose queries choose their keys."""


def linear(state: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """`W x + b` for one token."""
    bias = state.get(f"{name}.bias", 0.0)
    return state[f"{name}.weight"] @ x + bias


def logit(
    variant: str, state: dict[str, np.ndarray], x: np.ndarray, h: int, i: int, j: int, heads: int, **options
) -> float:
    """S[h, i, j] of one variant that is no mixture, for the tokens x (L, d) of one row."""
    if variant in ("random", "fixed_random"):
        return state["table"][h, i, j]
    if variant == "factorized_random":
        return sum(r1 * r2 for r1, r2 in zip(state["query_factor"][h, i], state["key_factor"][h, j], strict=True))
    if variant == "salience":
        return linear(state, "worth", x[j])[h]
    if variant == "dot_product":
        query, key = (np.split(linear(state, name, x[t]), heads)[h] for name, t in (("query", i), ("key", j)))
        return options.get("scaling", 1 / math.sqrt(len(query))) * sum(q * k for q, k in zip(query, key, strict=True))
    if variant == "relative":
        return distance_logit(state["table"][h], state["sinks"][h], i, j, **options)
    hidden = np.split(np.maximum(linear(state, "hidden", x[i]), 0.0), heads)[h]
    if variant == "relative_dense":
        row = state["columns"][h] @ hidden + state["bias"][h]
        return distance_logit(row, state["sinks"][h], i, j, **options)
    if variant == "dense":
        return sum(u * w for u, w in zip(hidden, state["columns"][h, j], strict=True)) + state["bias"][h, j]
    if variant == "factorized_dense":
        inner = hidden @ state["inner_weight"][h] + state["inner_bias"][h, 0]
        outer = hidden @ state["outer_weight"][h] + state["outer_bias"][h, 0]
        return inner[j % len(inner)] * outer[j // len(inner)]
    raise KeyError(variant)


def distance_logit(
    row: np.ndarray, sinks: np.ndarray, i: int, j: int, max_distance: int = 128, first: int = 0, **_
) -> float:
    """row[clip(j − i, −D, D or 0) + D] + sinks[j − first]; `first` is the row's first token."""
    column = min(max(j - i, -max_distance) + max_distance, len(row) - 1)
    return row[column] + (sinks[j - first] if 0 <= j - first < len(sinks) else 0.0)


def mixing_weight(variant: str, part: str, state: dict[str, np.ndarray], h: int, mixing: str) -> float:
    """α[h, c] of one part of a mixture."""
    competitors = [p for p in variant.split("+") if mixing == "sum" or p != "salience"]
    if part not in competitors or (mixing == "softmax" and len(competitors) == 1):
        return 1.0
    weights = state["mixing_weights"][h]
    if mixing == "softmax":
        weights = np.exp(weights) / np.exp(weights).sum()
    else:
        weights = weights + state["mixing_change"][h]
    return weights[competitors.index(part)]


def logits(
    variant: str, state: dict[str, np.ndarray], x: np.ndarray, heads: int, mixing: str = "softmax", **options
) -> np.ndarray:
    """S (H, L, L) of any variant, for the tokens x (L, d) of one row."""
    length, parts = len(x), variant.split("+")
    out = np.zeros((heads, length, length))
    if variant in SHARED:
        return chosen_logits(variant, state, x, heads, **options)
    for h in range(heads):
        for part in parts:
            prefix = f"parts.{part}." if len(parts) > 1 else ""
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            alpha = mixing_weight(variant, part, state, h, mixing) if len(parts) > 1 else 1.0
            for i in range(length):
                for j in range(length):
                    out[h, i, j] += alpha * logit(part, own, x, h, i, j, heads, **options)
    return out


def chosen_logits(
    variant: str,
    state: dict[str, np.ndarray],
    x: np.ndarray,
    heads: int,
    *,
    keep: list[bool],
    scaling: float | None = None,
    **options,
) -> np.ndarray:
    """Inner products of shared queries and keys, and −∞ where a query does not choose a key: (H, L, L)."""
    vectors = np.stack([np.split(linear(state, "projection", token), heads) for token in x], axis=1)  # (H, L, d)
    meets = naive_choices.chosen(variant, state, vectors, keep, **options)
    scaling = 1 / math.sqrt(vectors.shape[-1]) if scaling is None else scaling
    out = np.full(meets.shape, -np.inf)
    for h, i, j in zip(*meets.nonzero(), strict=True):
        out[h, i, j] = scaling * sum(a * b for a, b in zip(vectors[h, i], vectors[h, j], strict=True))
    return out


def attention(
    scores: np.ndarray, values: np.ndarray, keep: np.ndarray, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over the visible keys and the weighted sum of values, one number at a time.

    scores (H, L, L), values (H, L, d_v), keep (L,) → weights (H, L, L), output (L, H·d_v).
    """
    heads, length, _ = scores.shape
    weights, output = np.zeros_like(scores), np.zeros((length, heads, values.shape[-1]))
    for h in range(heads):
        for i in range(length):
            visible = [j for j in range(length) if keep[j] and not (causal and j > i) and scores[h, i, j] > -np.inf]
            if not visible:
                continue
            top = max(scores[h, i, j] for j in visible)
            total = sum(math.exp(scores[h, i, j] - top) for j in visible)
            for j in visible:
                weights[h, i, j] = math.exp(scores[h, i, j] - top) / total
                output[i, h] += weights[h, i, j] * values[h, j]
    return weights, output.reshape(length, -1)
