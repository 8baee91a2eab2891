"""The backward kernels. Each makes the tiles of logits again and sums what it owns alone, in a fixed order, without atomics.

`keys_kernel` owns some keys and walks over the queries that see them: gradients of values, keys and key biases.
`queries_kernel` owns some queries and walks over their keys: gradients of queries and of the outer product's factors.
`table_kernel` owns a tile of a static table and walks over the rows of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    ANY_VALUE,
    inner_factor,
    kept_weights,
    keys_of,
    logits_gradient,
    logits_tile,
    product,
    store_wide_rows,
    wide_rows,
)


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
    PRECISION: tl.constexpr,
):
    """Gradients of values and keys (B, H, Lk, WIDTH) and of biases (B, H, Lk), all contiguous."""
    row_of_batch, head = tl.program_id(0) % batch, tl.program_id(0) // batch
    place = row_of_batch * heads + head
    turns = tl.cdiv(key_length, a)
    turn, chunk = tl.program_id(1) % turns, tl.program_id(1) // turns
    keys, keys_there = keys_of(turn, chunk, a, key_length, KEYS)

    value_tile = wide_rows(
        value + row_of_batch * value_batch + head * value_head, value_row, keys, keys_there, WIDTH
    )
    bias_tile = tl.load(bias + row_of_batch * bias_batch + head * bias_head + keys, mask=keys_there, other=0.0)
    output_grad += row_of_batch * output_grad_batch + head * output_grad_head
    if LOW_RANK:
        query += row_of_batch * query_batch + head * query_head
        key_tile = wide_rows(key + row_of_batch * key_batch + head * key_head, key_row, keys, keys_there, WIDTH)
    else:
        key_tile = None
    if STATIC:
        table += head * table_head
        weight_of_head = tl.load(weight + head)
    else:
        weight_of_head = None

    value_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    bias_sum = tl.zeros([KEYS], tl.float32)
    if LOW_RANK:
        key_sum = tl.zeros([KEYS, WIDTH], tl.float32)
    first = tl.maximum(0, turn * a + chunk * KEYS - causal_offset) // ROWS  # tiles of queries before it see nothing
    for tile in range(first, tl.cdiv(query_length, ROWS)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        rows_there = rows < query_length
        factor_rows = place.to(tl.int64) * query_length + rows
        if LOW_RANK:
            query_tile = wide_rows(query, query_row, rows, rows_there, WIDTH)
        else:
            query_tile = None
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
            outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
        else:
            inner_tile = None
            outer_column = None
        logits = logits_tile(
            query_tile,
            key_tile,
            table,
            table_row,
            weight_of_head,
            inner_tile,
            outer_column,
            bias_tile,
            rows,
            keys,
            rows_there,
            keys_there,
            causal_offset,
            LOW_RANK,
            STATIC,
            TILED,
            PRECISION,
        )
        gradient_tile = wide_rows(output_grad, output_grad_row, rows, rows_there, WIDTH)
        weights, logits_grad = logits_gradient(
            logits,
            tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf")),
            gradient_tile,
            value_tile,
            tl.load(delta + factor_rows, mask=rows_there, other=0.0),
            seed,
            place,
            rows,
            keys,
            dropped,
            scale,
            PRECISION,
        )
        value_sum = product(tl.trans(weights.to(gradient_tile.dtype)), gradient_tile, value_sum, PRECISION)
        bias_sum += tl.sum(logits_grad, 0)
        if LOW_RANK:
            key_sum = product(tl.trans(logits_grad.to(query_tile.dtype)), query_tile, key_sum, PRECISION)

    first_key = place.to(tl.int64) * key_length
    store_wide_rows(value_grad + first_key * WIDTH, WIDTH, keys, keys_there, value_sum * scale, WIDTH)
    tl.store(bias_grad + first_key + keys, bias_sum, mask=keys_there)
    if LOW_RANK:
        store_wide_rows(key_grad + first_key * WIDTH, WIDTH, keys, keys_there, key_sum, WIDTH)


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
    PRECISION: tl.constexpr,
):
    """Gradients of queries (B, H, Lq, WIDTH), inner (B, H, Lq, a) and outer (B, H, Lq, b), contiguous; outer's starts as zeros."""
    row_of_batch, head = tl.program_id(0) % batch, tl.program_id(0) // batch
    place = row_of_batch * heads + head
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    rows_there = rows < query_length
    factor_rows = place.to(tl.int64) * query_length + rows
    seen = tl.minimum(key_length, start + ROWS + causal_offset)

    value += row_of_batch * value_batch + head * value_head
    bias += row_of_batch * bias_batch + head * bias_head
    output_grad += row_of_batch * output_grad_batch + head * output_grad_head
    gradient_tile = wide_rows(output_grad, output_grad_row, rows, rows_there, WIDTH)
    normaliser_tile = tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf"))
    delta_tile = tl.load(delta + factor_rows, mask=rows_there, other=0.0)
    if LOW_RANK:
        query += row_of_batch * query_batch + head * query_head
        key += row_of_batch * key_batch + head * key_head
        query_tile = wide_rows(query, query_row, rows, rows_there, WIDTH)
        query_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    else:
        query_tile = None
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
            if LOW_RANK:
                key_tile = wide_rows(key, key_row, keys, keys_there, WIDTH)
            else:
                key_tile = None
            if TILED:
                outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
            else:
                outer_column = None
            logits = logits_tile(
                query_tile,
                key_tile,
                table,
                table_row,
                weight_of_head,
                inner_tile,
                outer_column,
                tl.load(bias + keys, mask=keys_there, other=0.0),
                rows,
                keys,
                rows_there,
                keys_there,
                causal_offset,
                LOW_RANK,
                STATIC,
                TILED,
                PRECISION,
            )
            _, logits_grad = logits_gradient(
                logits,
                normaliser_tile,
                gradient_tile,
                wide_rows(value, value_row, keys, keys_there, WIDTH),
                delta_tile,
                seed,
                place,
                rows,
                keys,
                dropped,
                scale,
                PRECISION,
            )
            if LOW_RANK:
                query_sum = product(logits_grad.to(key_tile.dtype), key_tile, query_sum, PRECISION)
            if TILED:
                inner_sum += logits_grad * outer_column[:, None]
                places = outer_grad + factor_rows * b + turn
                earlier = tl.load(places, mask=rows_there & (chunk > 0), other=0.0)
                tl.store(places, earlier + tl.sum(logits_grad * inner_tile, 1), mask=rows_there)
        if TILED:
            columns = chunk * KEYS + tl.arange(0, KEYS)
            places = inner_grad + factor_rows[:, None] * a + columns[None, :]
            tl.store(places, inner_sum, mask=rows_there[:, None] & (columns < a)[None, :])
            tl.debug_barrier()  # the next chunk adds to what other threads have stored

    if LOW_RANK:
        first_row = place.to(tl.int64) * query_length
        store_wide_rows(query_grad + first_row * WIDTH, WIDTH, rows, rows_there, query_sum, WIDTH)


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
        place = row_of_batch * heads + head
        factor_rows = place.to(tl.int64) * query_length + rows
        if LOW_RANK:
            from_query = query + row_of_batch * query_batch + head * query_head
            from_key = key + row_of_batch * key_batch + head * key_head
            query_tile = wide_rows(from_query, query_row, rows, rows_there, WIDTH)
            key_tile = wide_rows(from_key, key_row, keys, keys_there, WIDTH)
        else:
            query_tile = None
            key_tile = None
        if TILED:
            inner_tile = inner_factor(inner, factor_rows, rows_there, chunk, a, KEYS)
            outer_column = tl.load(outer + factor_rows * b + turn, mask=rows_there, other=0.0)
        else:
            inner_tile = None
            outer_column = None
        from_bias = bias + row_of_batch * bias_batch + head * bias_head
        logits = logits_tile(
            query_tile,
            key_tile,
            table,
            table_row,
            weight_of_head,
            inner_tile,
            outer_column,
            tl.load(from_bias + keys, mask=keys_there, other=0.0),
            rows,
            keys,
            rows_there,
            keys_there,
            causal_offset,
            LOW_RANK,
            STATIC,
            TILED,
            PRECISION,
        )
        from_gradient = output_grad + row_of_batch * output_grad_batch + head * output_grad_head
        from_value = value + row_of_batch * value_batch + head * value_head
        _, logits_grad = logits_gradient(
            logits,
            tl.load(normaliser + factor_rows, mask=rows_there, other=float("inf")),
            wide_rows(from_gradient, output_grad_row, rows, rows_there, WIDTH),
            wide_rows(from_value, value_row, keys, keys_there, WIDTH),
            tl.load(delta + factor_rows, mask=rows_there, other=0.0),
            seed,
            place,
            rows,
            keys,
            dropped,
            scale,
            PRECISION,
        )
        table_sum += logits_grad

    places = (head.to(tl.int64) * query_length + rows)[:, None] * key_length + keys[None, :]
    tl.store(table_grad + places, table_sum, mask=rows_there[:, None] & keys_there[None, :])
