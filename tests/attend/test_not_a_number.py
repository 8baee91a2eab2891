"""NaN and infinite logits in the native kernels: a model that diverged must say so, as it does on the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_synthesizer import SynthesizerAttention
from hf_synthesizer.attend import attend, native, reference
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import Explicit, Logits, LowRank, Static, Tiled
from hf_synthesizer.logits.masks import AttentionMask

compiled = pytest.mark.compiler
BATCH, HEADS, QUERIES, KEYS = 2, 2, 70, 600  # two tiles of queries and of keys
NAN, INF = float("nan"), float("inf")
FROM_A_GPU = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
"""A NaN of ones alone, which is what CUDA writes."""
ROW = {
    "one NaN": [(5, NAN)],
    "one NaN of a GPU": [(5, FROM_A_GPU)],
    "one NaN in the second tile": [(590, NAN)],
    "all NaN": [(slice(None), NAN)],
    "all NaN of a GPU": [(slice(None), FROM_A_GPU)],
    "NaN and -inf": [(slice(None), -INF), (7, NAN)],
    "a tile of -inf and NaN": [(slice(0, 512), -INF), (8, NAN)],
    "inf": [(5, INF)],
    "inf in the second tile": [(590, INF)],
    "inf and -inf": [(slice(None), -INF), (7, INF)],
}
MASKS = {
    "none": lambda: AttentionMask(),
    "padding": lambda: AttentionMask((torch.arange(KEYS) < torch.tensor([[KEYS], [550]]))[:, None, None]),
    "left padding": lambda: AttentionMask((torch.arange(KEYS) >= torch.tensor([[0], [3]]))[:, None, None]),
    "triangle": lambda: AttentionMask(causal_offset=KEYS - QUERIES + 5),
    "scattered": lambda: AttentionMask(torch.rand(BATCH, 1, QUERIES, KEYS) > 0.3),
}


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal where they are numbers, and NaN in the same places."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def require_same(logits: Logits, value: torch.Tensor, mask: AttentionMask, inputs: list[torch.Tensor]) -> None:
    terms = Terms.of(logits, mask)
    assert native.serves(terms, value, mask, 0.0)
    actual, reference_output = (
        native.native_attention(terms, value, mask),
        reference.reference_attention(logits, value, mask)[0],
    )
    same(actual, reference_output)
    upstream = torch.randn_like(reference_output)
    grads = [torch.autograd.grad(made, inputs, upstream) for made in (actual, reference_output)]
    for grad, expected in zip(*grads, strict=True):
        same(grad, expected, 1e-3)
    with torch.no_grad():
        same(attend(logits, value, mask)[0], reference_output)  # by whatever route


@compiled
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("row", ROW)
def test_a_diverged_table_gives_what_the_reference_gives(row: str, mask: str) -> None:
    torch.manual_seed(0)
    table = torch.randn(HEADS, QUERIES, KEYS)
    for place, number in ROW[row]:
        table[1, 3, place] = number
    table.requires_grad_()
    value = torch.randn(BATCH, HEADS, KEYS, 8, requires_grad=True)
    require_same(Static(table), value, MASKS[mask](), [table, value])


@compiled
@pytest.mark.parametrize("row", ["one NaN", "all NaN", "all NaN of a GPU", "inf"])
def test_logits_of_each_row_of_the_batch_may_diverge_alone(row: str) -> None:
    explicit = torch.randn(BATCH, HEADS, QUERIES, KEYS)
    for place, number in ROW[row]:
        explicit[1, 0, 69, place] = number
    explicit.requires_grad_()
    value = torch.randn(BATCH, HEADS, KEYS, 8, requires_grad=True)
    require_same(Explicit(explicit), value, MASKS["padding"](), [explicit, value])


@compiled
@pytest.mark.parametrize("number", [INF, -INF, NAN, FROM_A_GPU], ids=["inf", "-inf", "nan", "nan of a GPU"])
@pytest.mark.parametrize("form", ["low_rank", "tiled"])
def test_an_infinite_factor_gives_nan_where_the_reference_does(form: str, number: float | torch.Tensor) -> None:
    torch.manual_seed(0)
    value = torch.randn(BATCH, HEADS, KEYS, 8)
    if form == "low_rank":
        left, right = torch.randn(BATCH, HEADS, QUERIES, 4), torch.randn(BATCH, HEADS, KEYS, 4)
        logits: Logits = LowRank(left, right)
    else:
        left, right = torch.randn(BATCH, HEADS, QUERIES, 24), torch.randn(BATCH, HEADS, QUERIES, 25)
        logits = Tiled(left, right, KEYS)
    left[1, 1, 3] = number
    for tensor in (left, right):
        tensor.requires_grad_()
    terms = Terms.of(logits, AttentionMask())
    actual, reference_output = (
        native.native_attention(terms, value, AttentionMask()),
        reference.reference_attention(logits, value, AttentionMask())[0],
    )
    assert reference_output[1, 1, 3].isnan().all() and not reference_output[0].isnan().any()
    same(actual, reference_output)
    upstream = torch.randn_like(reference_output)
    grads = [torch.autograd.grad(made, (left, right), upstream) for made in (actual, reference_output)]
    for grad, expected in zip(*grads, strict=True):
        same(grad, expected, 1e-3)


@compiled
@pytest.mark.parametrize("row", ["one NaN", "all NaN", "NaN and -inf", "inf"])
def test_a_diverged_table_of_bfloat16_gives_nan_rows(row: str) -> None:
    table = torch.randn(HEADS, QUERIES, KEYS, dtype=torch.bfloat16)
    for place, number in ROW[row]:
        table[1, 3, place] = number
    table.requires_grad_()
    value = torch.randn(BATCH, HEADS, KEYS, 8, dtype=torch.bfloat16, requires_grad=True)
    mask = MASKS["padding"]()
    actual, reference_output = (
        native.native_attention(Terms.of(Static(table), mask), value, mask),
        reference.reference_attention(Static(table), value, mask)[0],
    )
    assert torch.equal(actual.isnan(), reference_output.isnan()) and actual.isnan().any()
    upstream = torch.randn_like(reference_output)
    grads = [torch.autograd.grad(made, (table, value), upstream) for made in (actual, reference_output)]
    for grad, expected in zip(*grads, strict=True):
        assert torch.equal(grad.isnan(), expected.isnan())


@compiled
def test_dropout_hides_no_nan() -> None:
    table = torch.randn(HEADS, QUERIES, KEYS)
    table[1, 3] = NAN
    table.requires_grad_()
    value, mask = torch.randn(BATCH, HEADS, KEYS, 8), MASKS["padding"]()
    actual = native.native_attention(Terms.of(Static(table), mask), value, mask, 0.3)
    assert actual[:, 1, 3].isnan().all() and int(actual.isnan().sum()) == BATCH * 8
    (grad,) = torch.autograd.grad(actual.sum(), table)
    assert grad[1, 3].isnan().all() and int(grad.isnan().sum()) == KEYS


@compiled
def test_a_query_whose_logits_are_all_minus_infinity_gives_zeros_and_no_gradient() -> None:
    table = torch.randn(HEADS, QUERIES, KEYS)
    table[1, 3] = -INF
    table.requires_grad_()
    value = torch.randn(BATCH, HEADS, KEYS, 8, requires_grad=True)
    actual = native.native_attention(Terms.of(Static(table), AttentionMask()), value, AttentionMask())
    assert actual.isfinite().all() and not actual[:, 1, 3].any()
    grads = torch.autograd.grad(actual.square().sum(), (table, value))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][1, 3].any()


@compiled
def test_a_layer_that_diverged_does_not_train_on() -> None:
    layer = SynthesizerAttention(16, 2, variant="random", max_length=40)
    with torch.no_grad():
        layer.synthesizer.table.fill_(NAN)
    output = layer(torch.randn(2, 40, 16), need_weights=False)[0]
    assert output.isnan().all()
    output.sum().backward()
    assert layer.synthesizer.table.grad.isnan().all()


@compiled
def test_all_of_this_holds_for_the_build_of_avx2() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not avx2", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
