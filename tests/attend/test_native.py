"""The native kernels: equal to the reference, forward and backward."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hf_synthesizer import SynthesizerConfig
from hf_synthesizer.attend import attend, choose_route, native, reference
from hf_synthesizer.attend.native import autograd, build, operands
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import Explicit, KeyBias, Logits, LowRank, Static, Sum, Tiled
from hf_synthesizer.logits.masks import AttentionMask
from hf_synthesizer.synthesizers import build_synthesizer

MASKS = ("none", "padding", "holes", "causal", "causal-padding", "scattered", "blind")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
compiled = pytest.mark.compiler


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * 0.6).to(dtype).requires_grad_()


def make_mask(name: str, batch: int, queries: int, keys: int) -> AttentionMask:
    lengths = torch.tensor([keys - 5 * row for row in range(batch)])
    padding = (torch.arange(keys) < lengths[:, None])[:, None, None]
    if name == "padding":
        return AttentionMask(padding)
    if name == "holes":
        return AttentionMask(torch.rand(batch, 1, 1, keys) > 0.4)
    if name == "causal":
        return AttentionMask(causal_offset=keys - queries)
    if name == "causal-padding":
        return AttentionMask(padding, causal_offset=0)
    if name == "scattered":
        return AttentionMask(torch.rand(batch, 2, queries, keys) > 0.4, bias=torch.randn(batch, 1, queries, keys))
    if name == "blind":  # the first row sees nothing at all
        return AttentionMask(padding & torch.arange(batch).bool()[:, None, None, None])
    return AttentionMask()


def everything(
    batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype
) -> tuple[Logits, list[torch.Tensor]]:
    """A sum of all that there is, and the tensors it is made of."""
    inputs = [
        tensor(heads, dtype=torch.float32),
        tensor(heads, queries, keys, dtype=dtype),
        tensor(heads, queries, 3, dtype=dtype),
        tensor(heads, keys, 3, dtype=dtype),
        tensor(batch, queries, heads, 9, dtype=dtype),
        tensor(1, heads, keys, 9, dtype=dtype),
        tensor(1, heads, keys, dtype=dtype),
        tensor(batch, heads, queries, 7, dtype=dtype),
        tensor(batch, heads, queries, -(-keys // 7), dtype=dtype),
        tensor(batch, heads, 1, keys, dtype=dtype),
        tensor(batch, heads, queries, keys, dtype=dtype),
    ]
    weight, table, left, right, query, key, key_bias, inner, outer, salience, explicit = inputs
    parts: list[tuple[torch.Tensor | None, Logits]] = [
        (weight, Static(table)),
        (None, Static(left, right)),
        (None, LowRank(query.transpose(1, 2), key, key_bias)),
        (None, Tiled(inner, outer, keys)),
        (None, KeyBias(salience, queries)),
        (None, Explicit(explicit)),
    ]
    return Sum(parts), inputs


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


@compiled
def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    assert native.unavailable_reason() is None and build.library() is not None


@compiled
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "shape", [(2, 2, 37, 37), (3, 2, 70, 133), (1, 2, 65, 1050)], ids=["one", "odd", "several tiles"]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_a_sum_of_everything_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], mask: str) -> None:
    batch, heads, queries, keys = shape
    logits, inputs = everything(*shape, dtype)
    value = tensor(batch, keys, heads, 20, dtype=dtype)
    inputs.append(value)
    attention_mask = make_mask(mask, batch, queries, keys)
    terms = Terms.of(logits, attention_mask)
    assert native.serves(terms, value.transpose(1, 2), attention_mask, 0.0)
    actual = native.native_attention(terms, value.transpose(1, 2), attention_mask)
    # The reference in float32, of the very same numbers: in bfloat16 it would round what the kernels do not.
    exact = [x.detach().float().requires_grad_() for x in inputs]
    exact_logits = rebuilt(logits, dict(zip(map(id, inputs), exact, strict=True)), inputs)
    reference_output = reference.reference_attention(exact_logits, exact[-1].transpose(1, 2), attention_mask)[0]
    close(actual, reference_output, TOLERANCE[dtype])
    upstream = torch.randn_like(reference_output)
    grads = torch.autograd.grad(actual, inputs, upstream.to(dtype))
    for grad, expected in zip(grads, torch.autograd.grad(reference_output, exact, upstream), strict=True):
        close(grad, expected, 10 * TOLERANCE[torch.float32] if dtype == torch.float32 else TOLERANCE[dtype])
    with torch.no_grad():
        close(
            native.native_attention(Terms.of(logits, attention_mask), value.transpose(1, 2), attention_mask),
            reference_output,
            TOLERANCE[dtype],
        )


@compiled
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_no_query_sees_has_zeros_in_the_gradient_of_a_table(batch: int, dtype: torch.dtype) -> None:
    """Nobody clears that memory before the kernels write it."""
    keys = 600
    table, value = tensor(2, keys, keys, dtype=dtype), tensor(batch, 2, keys, 8, dtype=dtype)
    mask = make_mask("causal-padding", batch, keys, keys)
    upstream = torch.randn_like(value)
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        actual = native.native_attention(Terms.of(Static(table), mask), value, mask)
        gradients = torch.autograd.grad(actual, (table, value), upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [x.detach().float().requires_grad_() for x in (table, value)]
    reference_output = reference.reference_attention(Static(exact[0]), exact[1], mask)[0]
    for grad, expected in zip(gradients, torch.autograd.grad(reference_output, exact, upstream.float()), strict=True):
        assert grad.dtype == dtype
        close(grad, expected, 10 * TOLERANCE[torch.float32] if dtype == torch.float32 else TOLERANCE[dtype])
    assert not gradients[0].triu(1).any()


def rebuilt(logits: Logits, exact: dict[int, torch.Tensor], inputs: list[torch.Tensor]) -> Logits:
    """The sum of `everything` of other tensors."""
    weight, table, left, right, query, key, key_bias, inner, outer, salience, explicit = (
        exact[id(x)] for x in inputs[:-1]
    )
    queries, keys = table.shape[-2:]
    return Sum(
        [
            (weight, Static(table)),
            (None, Static(left, right)),
            (None, LowRank(query.transpose(1, 2), key, key_bias)),
            (None, Tiled(inner, outer, keys)),
            (None, KeyBias(salience, queries)),
            (None, Explicit(explicit)),
        ]
    )


@compiled
@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_every_variant_equals_the_reference(variant: str, dtype: torch.dtype, mask: str) -> None:
    synthesizer = build_synthesizer(SynthesizerConfig(variant), 32, 4, 40)
    attention_mask = make_mask(mask, 3, 33, 33)
    hidden_states, value = torch.randn(3, 33, 32), torch.randn(3, 4, 33, 8).to(dtype)
    if mask == "causal" and synthesizer.whole_sequence:
        mask, attention_mask = "none", AttentionMask()
    synthesizer.set_causal(mask == "causal")
    synthesizer = synthesizer.to(dtype)
    logits = synthesizer(hidden_states.to(dtype))
    actual, reference_output = (
        attend(logits, value, attention_mask)[0],
        reference.reference_attention(logits, value, attention_mask)[0],
    )
    close(actual, reference_output, TOLERANCE[dtype])
    parameters = [p for p in synthesizer.parameters() if p.requires_grad]
    if parameters and reference_output.requires_grad:
        both = [
            torch.autograd.grad(out.float().square().sum(), parameters, retain_graph=True, allow_unused=True)
            for out in (actual, reference_output)
        ]
        for grad, expected in zip(*both, strict=True):
            if expected is not None and grad is not None:
                close(grad, expected, 1e-4 if dtype == torch.float32 else 0.1)


@compiled
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 2, 45, 45), (1, 2, 20, 700)], ids=["one tile", "two tiles"])
def test_dropout_is_the_reference_given_the_same_randomness(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, queries, keys = shape
    logits, inputs = everything(*shape, dtype)
    value = tensor(batch, heads, keys, 12, dtype=dtype)
    inputs.append(value)
    mask = make_mask("padding", batch, queries, keys)
    kernel_inputs, tensors = operands.KernelInputs.of(Terms.of(logits, mask), value, mask, 0.3, True)
    actual = autograd.attention_by_kernels(kernel_inputs, tensors)
    weights = reference.reference_attention(logits, value, mask)[1].float() * autograd.dropout_factors(
        kernel_inputs, tensors
    )
    reference_output = weights @ value.float()
    loose = TOLERANCE[dtype] * 3
    close(actual, reference_output, loose)
    upstream = torch.randn_like(reference_output)
    grads = torch.autograd.grad(actual, inputs, upstream.to(dtype))
    for grad, expected in zip(grads, torch.autograd.grad(reference_output, inputs, upstream), strict=True):
        close(grad, expected, loose * 2)


@compiled
def test_dropout_drops_as_often_as_asked_and_nothing_twice_alike() -> None:
    value = torch.randn(2, 3, 400, 8)
    terms = Terms.of(Static(torch.zeros(3, 300, 400)), AttentionMask())
    torch.manual_seed(1)
    kernel_inputs, tensors = operands.KernelInputs.of(terms, value, AttentionMask(), 0.25, False)
    drawn = autograd.dropout_factors(kernel_inputs, tensors)
    kept = drawn > 0
    torch.testing.assert_close(drawn[kept], torch.full_like(drawn[kept], 1 / 0.75))
    spread = (0.25 * 0.75) ** 0.5
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3)):  # all, each key, each query
        rate = 1 - kept.float().mean(dims)
        assert (rate - 0.25).abs().max() < 5 * spread / (kept.numel() / rate.numel()) ** 0.5
    rows = kept.float().flatten(0, 2)[:600] - 0.75
    correlation = rows @ rows.t() / rows.square().sum(1)
    assert correlation.fill_diagonal_(0).abs().max() < 6 / 400**0.5
    columns = kept.float().flatten(0, 2).t() - 0.75
    correlation = columns @ columns.t() / columns.square().sum(1)
    assert correlation.fill_diagonal_(0).abs().max() < 6 / 1800**0.5
    again = operands.KernelInputs.of(terms, value, AttentionMask(), 0.25, False)[0]
    assert again.seed != kernel_inputs.seed
    torch.manual_seed(1)
    assert operands.KernelInputs.of(terms, value, AttentionMask(), 0.25, False)[0].seed == kernel_inputs.seed


@compiled
def test_a_gradient_of_the_gradient_is_that_of_the_reference() -> None:
    logits, inputs = everything(2, 2, 9, 12, torch.float32)
    value = tensor(2, 2, 12, 5)
    inputs.append(value)
    actual = []
    for out in (
        native.native_attention(Terms.of(logits, AttentionMask()), value, AttentionMask()),
        reference.reference_attention(logits, value, AttentionMask())[0],
    ):
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        actual.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for grad, expected in zip(*actual, strict=True):
        close(grad, expected, 1e-3)


@compiled
def test_the_same_call_gives_the_same_bits() -> None:
    logits, inputs = everything(2, 3, 130, 600, torch.float32)
    value = tensor(2, 3, 600, 16)
    runs = []
    for _ in range(2):
        out = native.native_attention(Terms.of(logits, AttentionMask()), value, AttentionMask())
        runs.append([out, *torch.autograd.grad(out.sum(), [value, *inputs])])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@compiled
def test_bfloat16_without_products_of_its_own_takes_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = build.library()
    assert kernels is not None
    monkeypatch.setattr(build, "_load_library", lambda: (kernels._replace(bfloat16=False), None))
    logits, _ = everything(2, 2, 30, 30, torch.bfloat16)
    value = torch.randn(2, 2, 30, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        close(attend(logits, value)[0], reference.reference_attention(logits, value, AttentionMask())[0], 3e-2)


@compiled
@pytest.mark.parametrize(
    ("form", "dropout", "length"), [("tiled", 0.0, 8), ("low_rank", 0.0, 300), ("static", 0.1, 8)]
)
def test_the_native_route_is_taken_before_the_others_on_a_processor(form: str, dropout: float, length: int) -> None:
    forms = {
        "tiled": Tiled(tensor(2, 2, length, 8), tensor(2, 2, length, -(-length // 8)), length),
        "low_rank": LowRank(tensor(2, 2, length, 4), tensor(2, 2, length, 4)),
        "static": Static(tensor(2, length, length)),
    }
    terms = Terms.of(forms[form], AttentionMask())
    assert choose_route(terms, torch.randn(2, 2, length, 4), AttentionMask(), dropout) == "native"


@compiled
def test_the_structures_are_those_of_the_source() -> None:
    """A field that one side lacks would shift all behind it."""
    library = build.library()
    assert library is not None
    assert library.functions.hf_size() == ctypes.sizeof(operands.KernelArguments)
