"""The forward kernel: the output, and the logarithm of each row's sum of exponentials."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ANY_VALUE, inner_factor, kept_weights, keys_of, logits_tile, product, store_wide_rows, wide_rows


@triton.jit(do_not_specialize=ANY_VALUE)
def forward_kernel(
    value,
    value_batch: tl.int64,
    value_head: tl.int64,
    value_row: tl.int64,
    query,
    query_batch: tl.int64,
    query_head: tl.int64,
    query_row: tl.int64,
    key,
    key_batch: tl.int64,
    key_head: tl.int64,
    key_row: tl.int64,
    table,
    table_head: tl.int64,
    table_row: tl.int64,
    weight,
    inner,
    outer,
    bias,
    bias_batch: tl.int64,
    bias_head: tl.int64,
    output,
    output_batch: tl.int64,
    output_head: tl.int64,
    output_row: tl.int64,
    normaliser,
    batch: tl.int32,
    heads: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    a: tl.int32,
    b: tl.int32,
    causal_offset: tl.int32,
    seed: tl.int64,
    dropped: tl.int64,
    scale: tl.float32,
    LOW_RANK: tl.constexpr,
    STATIC: tl.constexpr,
    TILED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: some queries of one head of one row of the batch, over all keys that they see."""
    # Rows of the batch are consecutive, so that a table they share stays in the cache.
    row_of_batch, head = tl.program_id(0) % batch, tl.program_id(0) // batch
    batch_head = row_of_batch * heads + head
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    rows_there = rows < query_length
    factor_rows = batch_head.to(tl.int64) * query_length + rows
    seen = tl.minimum(key_length, start + ROWS + causal_offset)

    value += row_of_batch * value_batch + head * value_head
    bias += row_of_batch * bias_batch + head * bias_head
    if LOW_RANK:
        query += row_of_batch * query_batch + head * query_head
        key += row_of_batch * key_batch + head * key_head
    if STATIC:
        table += head * table_head
        weight_of_head = tl.load(weight + head)
    else:
        weight_of_head = None

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for chunk in range(0, tl.cdiv(a, KEYS)):
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
        else:
            inner_tile = None
        for turn in range(0, tl.cdiv(seen - chunk * KEYS, a)):
            keys, keys_there = keys_of(turn, chunk, a, key_length, KEYS)
            if TILED:
                outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
            else:
                outer_column = None
            logits = logits_tile(
                query,
                query_row,
                key,
                key_row,
                table,
                table_row,
                weight_of_head,
                inner_tile,
                outer_column,
                tl.load(bias + keys, mask=keys_there, other=0.0),
                rows,
                rows_there,
                keys,
                keys_there,
                causal_offset,
                LOW_RANK,
                STATIC,
                TILED,
                WIDTH,
                PART,
                PRECISION,
            )
            risen = tl.maximum(highest, tl.max(logits, 1))
            base = tl.where(risen == float("-inf"), 0.0, risen)  # −∞ − (−∞) is NaN
            weights = tl.exp2(logits - base[:, None])
            shrunk = tl.exp2(highest - base)
            total = total * shrunk + tl.sum(weights, 1)
            if dropped > 0:
                weights = tl.where(kept_weights(seed, batch_head, rows, keys, dropped), weights, 0.0)
            value_tile = wide_rows(value, value_row, keys, keys_there, WIDTH)
            result = result * shrunk[:, None]
            result = product(weights.to(value_tile.dtype), value_tile, result, PRECISION)
            highest = risen

    empty = total == 0.0
    result = result * (scale / tl.where(empty, 1.0, total))[:, None]
    output += row_of_batch * output_batch + head * output_head
    store_wide_rows(output, output_row, rows, rows_there, result, WIDTH)
    # +∞ for a query without a visible key: its weights 2^(logits − ∞) are 0 in the backward.
    known = tl.where(empty, float("inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(normaliser + batch_head.to(tl.int64) * query_length + rows, known, mask=rows_there)
