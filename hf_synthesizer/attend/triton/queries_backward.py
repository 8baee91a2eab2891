"""The backward kernel for queries: each program has a tile of queries, and loops over the keys that they see.

It recomputes the tiles of logits. Only it writes its gradients, in a fixed order, without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ANY_VALUE, inner_factor, keys_of, logits_gradient, logits_tile, product, store_wide_rows, wide_rows


@triton.jit(do_not_specialize=ANY_VALUE)
def queries_kernel(
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
    query_grad,
    inner_grad,
    outer_grad,
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
    """Contiguous gradients of queries (B, H, Lq, WIDTH), inner (B, H, Lq, a) and outer (B, H, Lq, b): zeros first."""
    row_of_batch, head = tl.program_id(0) % batch, tl.program_id(0) // batch
    batch_head = row_of_batch * heads + head
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    rows_there = rows < query_length
    factor_rows = batch_head.to(tl.int64) * query_length + rows
    seen = tl.minimum(key_length, start + ROWS + causal_offset)

    value += row_of_batch * value_batch + head * value_head
    bias += row_of_batch * bias_batch + head * bias_head
    output_grad += row_of_batch * output_grad_batch + head * output_grad_head
    normaliser_tile = tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf"))
    delta_tile = tl.load(delta + factor_rows, mask=rows_there, other=0.0)
    if LOW_RANK:
        query += row_of_batch * query_batch + head * query_head
        key += row_of_batch * key_batch + head * key_head
        query_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    if STATIC:
        table += head * table_head
        weight_of_head = tl.load(weight + head)
    else:
        weight_of_head = None

    for chunk in range(0, tl.cdiv(a, KEYS)):
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
            inner_sum = tl.zeros([ROWS, KEYS], tl.float32)
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
            _, logits_grad = logits_gradient(
                logits,
                normaliser_tile,
                output_grad,
                output_grad_row,
                value,
                value_row,
                delta_tile,
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
            if LOW_RANK:
                key_tile = wide_rows(key, key_row, keys, keys_there, WIDTH)
                query_sum = product(logits_grad.to(key_tile.dtype), key_tile, query_sum, PRECISION)
            if TILED:
                inner_sum += logits_grad * outer_column[:, None]
                offsets = outer_grad + factor_rows * b + turn
                earlier = tl.load(offsets, mask=rows_there & (chunk > 0), other=0.0)
                tl.store(offsets, earlier + tl.sum(logits_grad * inner_tile, 1), mask=rows_there)
        if TILED:
            columns = chunk * KEYS + tl.arange(0, KEYS)
            offsets = inner_grad + factor_rows[:, None] * a + columns[None, :]
            tl.store(offsets, inner_sum, mask=rows_there[:, None] & (columns < a)[None, :])
            tl.debug_barrier()  # the next chunk adds to what other threads have stored

    if LOW_RANK:
        first_row = batch_head.to(tl.int64) * query_length
        store_wide_rows(query_grad + first_row * WIDTH, WIDTH, rows, rows_there, query_sum, WIDTH)
