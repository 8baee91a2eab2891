"""Functions that all kernels share: a tile of logits from its terms, its mask, and its dropout.

A key is j = turn · a + column, where a is the width of the outer product's inner factor. A tile of keys lies within one
turn. So its outer factor is one number for each query, and its inner factor is a tile that is the same in each turn.
Without an outer product, a is the width of a tile of keys.

Logits are in units of log 2, because the hardware computes 2^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(7)  # of Philox: the smallest number that passes all statistical tests

ANY_VALUE = (
    *("table", "table_head", "table_row", "weight", "inner", "outer", "bias", "bias_batch", "bias_head"),
    *("normaliser", "delta", "query_grad", "key_grad", "value_grad", "table_grad", "inner_grad", "outer_grad"),
    *("bias_grad", "batch", "heads", "query_length", "key_length", "a", "b", "causal_offset"),
    *("seed", "dropped", "scale"),
)
"""Arguments whose values never cause a new compilation. The launch makes all others multiples of 16."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(left, right, total, PRECISION: tl.constexpr):
    """`total + left @ right`, in float32."""
    if INTERPRETED:  # the interpreter would multiply the bits of a bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def rows_product(
    left,
    left_row,
    right,
    right_row,
    rows,
    rows_there,
    keys,
    keys_there,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`left[rows] @ right[keys]ᵀ`, PART columns at a time: all columns do not fit into the registers."""
    total = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
    for start in range(0, WIDTH, PART):
        left_part = wide_rows(left + start, left_row, rows, rows_there, PART)
        right_part = wide_rows(right + start, right_row, keys, keys_there, PART)
        total = product(left_part, tl.trans(right_part), total, PRECISION)
    return total


@triton.jit
def keys_of(turn, chunk, a, key_length, KEYS: tl.constexpr):
    """The keys of a tile, and whether each of them exists."""
    columns = chunk * KEYS + tl.arange(0, KEYS)
    keys = turn * a + columns
    return keys, (columns < a) & (keys < key_length)


@triton.jit
def inner_factor(inner, offsets, rows_there, chunk, a, KEYS: tl.constexpr):
    """The inner factor of a tile, (rows, keys): the same in each turn."""
    columns = chunk * KEYS + tl.arange(0, KEYS)
    there = rows_there[:, None] & (columns < a)[None, :]
    return tl.load(inner + offsets[:, None] * a + columns[None, :], mask=there, other=0.0)


@triton.jit
def wide_rows(tensor, row_stride, rows, there, WIDTH: tl.constexpr):
    """Rows of a tensor whose width is WIDTH; zeros for rows that do not exist."""
    offsets = rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(tensor + offsets, mask=there[:, None], other=0.0)


@triton.jit
def store_wide_rows(tensor, row_stride, rows, there, tile, WIDTH: tl.constexpr):
    offsets = rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]
    tl.store(tensor + offsets, tile.to(tensor.dtype.element_ty), mask=there[:, None])


@triton.jit
def logits_tile(
    query,
    query_row,
    key,
    key_row,
    table,
    table_row,
    weight,
    inner,
    outer,
    bias,
    rows,
    rows_there,
    keys,
    keys_there,
    causal_offset,
    LOW_RANK: tl.constexpr,
    STATIC: tl.constexpr,
    TILED: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of a tile, (rows, keys) in units of log 2; −∞ for keys that a query does not see.

    query, key and `table` point to the data of one head. The table is multiplied by `weight`. inner is (rows, keys),
    outer (rows,), and the bias (keys,) is −∞ for hidden keys.
    """
    logits = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32) + bias[None, :]
    if LOW_RANK:
        logits += rows_product(
            query, query_row, key, key_row, rows, rows_there, keys, keys_there, WIDTH, PART, PRECISION
        )
    if STATIC:
        offsets = rows.to(tl.int64)[:, None] * table_row + keys[None, :]
        tile = tl.load(table + offsets, mask=rows_there[:, None] & keys_there[None, :], other=0.0)
        logits += tile.to(tl.float32) * weight
    if TILED:
        logits += inner * outer[:, None]
    visible = keys_there[None, :] & (keys[None, :] <= rows[:, None] + causal_offset)
    return tl.where(visible, logits * LOG2E, float("-inf"))


@triton.jit
def kept_weights(seed, batch_head, rows, keys, dropped):
    """True for weights that dropout keeps. The numbers of a (row and head, query, key) are the same in all kernels.

    `dropped` is the probability in units of 2⁻³².
    """
    nothing = tl.zeros([rows.shape[0], keys.shape[0]], tl.int32)
    draw, _, _, _ = tl.philox(
        seed, nothing + keys[None, :], nothing + rows[:, None], nothing + batch_head, nothing, ROUNDS
    )
    return draw >= dropped.to(tl.uint32)


@triton.jit
def logits_gradient(
    logits,
    normaliser,
    output_grad,
    output_grad_row,
    value,
    value_row,
    delta,
    rows,
    rows_there,
    keys,
    keys_there,
    seed,
    batch_head,
    dropped,
    scale,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(weights after dropout, without its scale; the gradient of the logits) of a tile.

    `delta` is the scalar product of a row's output and its gradient. It equals Σ weight · (gradient of the weight).
    """
    weights = tl.exp2(logits - normaliser[:, None])
    weights_grad = scale * rows_product(
        output_grad, output_grad_row, value, value_row, rows, rows_there, keys, keys_there, WIDTH, PART, PRECISION
    )
    left = weights
    if dropped > 0:
        kept = kept_weights(seed, batch_head, rows, keys, dropped)
        weights_grad = tl.where(kept, weights_grad, 0.0)
        left = tl.where(kept, weights, 0.0)
    return left, weights * (weights_grad - delta[:, None])
