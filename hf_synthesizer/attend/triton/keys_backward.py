"""The backward kernel for keys: each program has a tile of keys, and loops over the queries that see them.

It recomputes the tiles of logits. Only it writes its gradients, in a fixed order, without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ANY_VALUE, inner_factor, keys_of, logits_gradient, logits_tile, product, store_wide_rows, wide_rows


@triton.jit(do_not_specialize=ANY_VALUE)
def keys_kernel(
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
    output_grad,
    output_grad_batch: tl.int64,
    output_grad_head: tl.int64,
    output_grad_row: tl.int64,
    normaliser,
    delta,
    value_grad,
    key_grad,
    bias_grad,
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
    """Gradients of values and keys (B, H, Lk, WIDTH) and of biases (B, H, Lk), all contiguous."""
    row_of_batch, head = tl.program_id(0) % batch, tl.program_id(0) // batch
    batch_head = row_of_batch * heads + head
    turns = tl.cdiv(key_length, a)
    turn, chunk = tl.program_id(1) % turns, tl.program_id(1) // turns
    keys, keys_there = keys_of(turn, chunk, a, key_length, KEYS)

    value += row_of_batch * value_batch + head * value_head
    bias_tile = tl.load(bias + row_of_batch * bias_batch + head * bias_head + keys, mask=keys_there, other=0.0)
    output_grad += row_of_batch * output_grad_batch + head * output_grad_head
    if LOW_RANK:
        query += row_of_batch * query_batch + head * query_head
        key += row_of_batch * key_batch + head * key_head
    if STATIC:
        table += head * table_head
        weight_of_head = tl.load(weight + head)
    else:
        weight_of_head = None

    value_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    bias_sum = tl.zeros([KEYS], tl.float32)
    if LOW_RANK:
        key_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    first = (
        tl.maximum(0, turn * a + chunk * KEYS - causal_offset) // ROWS
    )  # earlier tiles of queries do not see these keys
    for tile in range(first, tl.cdiv(query_length, ROWS)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        rows_there = rows < query_length
        factor_rows = batch_head.to(tl.int64) * query_length + rows
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
            outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
        else:
            inner_tile = None
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
            bias_tile,
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
        weights, logits_grad = logits_gradient(
            logits,
            tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf")),
            output_grad,
            output_grad_row,
            value,
            value_row,
            tl.load(delta + factor_rows, mask=rows_there, other=0.0),
            rows,
            rows_there,
            keys,
            keys_there,
            seed,
            batch_head,
            dropped,
            scale,
            WIDTH,
            PART,
            PRECISION,
        )
        gradient_tile = wide_rows(output_grad, output_grad_row, rows, rows_there, WIDTH)
        value_sum = product(tl.trans(weights.to(gradient_tile.dtype)), gradient_tile, value_sum, PRECISION)
        bias_sum += tl.sum(logits_grad, 0)
        if LOW_RANK:
            query_tile = wide_rows(query, query_row, rows, rows_there, WIDTH)
            key_sum = product(tl.trans(logits_grad.to(query_tile.dtype)), query_tile, key_sum, PRECISION)

    first_key = batch_head.to(tl.int64) * key_length
    store_wide_rows(value_grad + first_key * WIDTH, WIDTH, keys, keys_there, value_sum * scale, WIDTH)
    tl.store(bias_grad + first_key + keys, bias_sum, mask=keys_there)
    if LOW_RANK:
        store_wide_rows(key_grad + first_key * WIDTH, WIDTH, keys, keys_there, key_sum, WIDTH)
