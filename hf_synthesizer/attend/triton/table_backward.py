"""The backward kernel for a static table: each program has a tile of the table, and loops over the rows of the batch.

It recomputes the tiles of logits. Only it writes its gradients, in a fixed order, without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ANY_VALUE, inner_factor, keys_of, logits_gradient, logits_tile


@triton.jit(do_not_specialize=ANY_VALUE)
def table_kernel(
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
    table_grad,
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
    """The gradient of `weight · table`, (H, Lq, Lk), contiguous: the first row of the batch first."""
    head = tl.program_id(0)
    start = tl.program_id(1) * ROWS
    turns = tl.cdiv(key_length, a)
    turn, chunk = tl.program_id(2) % turns, tl.program_id(2) // turns
    keys, keys_there = keys_of(turn, chunk, a, key_length, KEYS)
    rows = start + tl.arange(0, ROWS)
    rows_there = rows < query_length
    table += head * table_head
    weight_of_head = tl.load(weight + head)

    table_sum = tl.zeros([ROWS, KEYS], tl.float32)
    visible = turn * a + chunk * KEYS < start + ROWS + causal_offset
    for row_of_batch in range(0, tl.where(visible, batch, 0)):
        batch_head = row_of_batch * heads + head
        factor_rows = batch_head.to(tl.int64) * query_length + rows
        if LOW_RANK:
            from_query = query + row_of_batch * query_batch + head * query_head
            from_key = key + row_of_batch * key_batch + head * key_head
        else:
            from_query = None
            from_key = None
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
            outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
        else:
            inner_tile = None
            outer_column = None
        from_bias = bias + row_of_batch * bias_batch + head * bias_head
        logits = logits_tile(
            from_query,
            query_row,
            from_key,
            key_row,
            table,
            table_row,
            weight_of_head,
            inner_tile,
            outer_column,
            tl.load(from_bias + keys, mask=keys_there, other=0.0),
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
        from_gradient = output_grad + row_of_batch * output_grad_batch + head * output_grad_head
        from_value = value + row_of_batch * value_batch + head * value_head
        _, logits_grad = logits_gradient(
            logits,
            tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf")),
            from_gradient,
            output_grad_row,
            from_value,
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
        table_sum += logits_grad

    offsets = (head.to(tl.int64) * query_length + rows)[:, None] * key_length + keys[None, :]
    tl.store(table_grad + offsets, table_sum, mask=rows_there[:, None] & keys_there[None, :])
