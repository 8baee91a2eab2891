"""Each fast route equals the reference: any sum of forms, mask, length, dtype and stride, forward and backward."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings

from hf_synthesizer import SynthesizerAttention
from hf_synthesizer.attend import (
    ROUTES,
    Route,
    attend,
    choose_route,
    chunk_inputs,
    chunked,
    native,
    reference,
    sdpa,
    static,
)
from hf_synthesizer.attend.kernel_terms import KernelTerms
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.device import matmul
from hf_synthesizer.logits.forms import KeyBias, LowRank, Static, Sum
from hf_synthesizer.logits.masks import AttentionMask
from tests.helpers.models import mask as key_mask
from tests.helpers.problems import Posed, leaves, make_form, make_logits, make_mask, problems


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    problems([torch.float32, torch.float64, torch.bfloat16], rows=[2, 3, 512], chunk=[8, 100, 1 << 18]),
)
def test_fast_routes_equal_the_reference(problem) -> None:
    posed = Posed.of(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_inputs, "PROCESSOR_QUERIES", problem["rows"])
        patch.setattr(chunk_inputs, "PROCESSOR_LOGITS", problem["chunk"])
        patch.setattr(chunk_inputs, "FEWEST_HEADS", 1)
        patch.setattr(sdpa, "chunks_are_faster", lambda *_: False)  # all that it can serve
        for route in ("static", "native", "chunked", "sdpa"):
            posed.check(route)


@pytest.mark.parametrize("mask", ["none", "causal", "right", "position"])
@pytest.mark.parametrize(
    "names", [["static"], ["static", "salience"], ["low_rank", "static"], ["tiled"], ["biased", "tiled"]]
)
def test_gradcheck_in_float64(names: list[str], mask: str) -> None:
    shape = (2, 2, 4, 5)
    logits, attention_mask = (
        make_logits(names, True, *shape, dtype=torch.float64),
        make_mask(mask, *shape, torch.float64),
    )
    value = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    inputs = tuple(leaves(logits, attention_mask, value))
    for route in (ROUTES["static"], ROUTES["chunked"]):
        if route.serves(Terms.of(logits, attention_mask), value, attention_mask, 0.0):

            def output(*_: torch.Tensor, route: Route = route) -> torch.Tensor:
                return route.attention(Terms.of(logits, attention_mask), value, attention_mask)

            assert torch.autograd.gradcheck(output, inputs)


def test_dropout_of_the_chunked_route_is_the_same_in_forward_and_backward() -> None:
    """The output is linear in the values, so its gradient shows the very weights that the forward used."""
    logits = LowRank(torch.randn(2, 3, 6, 4), torch.randn(1, 3, 7, 4))
    value = torch.randn(2, 3, 7, 5, dtype=torch.float32, requires_grad=True)
    output = chunked.chunked_attention(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.5)
    upstream = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, value, upstream)
    torch.testing.assert_close((grad * value).sum(), (output * upstream).sum())


def test_dropout_drops_and_scales() -> None:
    heads, length, p = 2, 64, 0.3
    logits, eye = Static(torch.randn(heads, length, length)), torch.eye(length).expand(1, heads, -1, -1)
    expected = logits.materialize().softmax(-1)
    weights = attend(logits, eye, dropout=p)[0]  # the values are an identity: the output is the weights
    kept = weights != 0
    torch.testing.assert_close(weights[kept], (expected / (1 - p))[kept])
    assert abs(1 - kept.float().mean() - p) < 0.03


@pytest.mark.parametrize(
    ("form", "mask", "dropout", "length", "route"),
    [
        ("static", "none", 0.0, 8, "static"),
        ("static", "right", 0.0, 8, "static"),
        ("static", "causal", 0.0, 8, "static"),
        ("static", "causal-left", 0.0, 8, "static"),
        ("static", "position", 0.0, 8, "static"),
        ("static", "none", 0.1, 8, "reference"),
        ("static", "none", 0.1, 200, "chunked"),
        ("static", "scattered", 0.0, 8, "reference"),
        ("static", "scattered", 0.0, 200, "chunked"),
        ("low_rank", "none", 0.0, 8, "reference"),
        ("low_rank", "none", 0.0, 200, "sdpa"),
        ("low_rank", "none", 0.0, 300, "chunked"),
        ("low_rank", "right", 0.1, 8, "reference"),
        ("low_rank", "right", 0.1, 200, "chunked"),
        ("tiled", "none", 0.0, 8, "reference"),
        ("tiled", "none", 0.0, 80, "chunked"),
        ("salience", "none", 0.0, 200, "chunked"),
        ("explicit", "none", 0.0, 200, "chunked"),
        ("static", "none", 0.0, 1, "reference"),
        ("low_rank", "none", 0.0, 1, "reference"),
    ],
)
def test_the_rules_by_which_a_route_is_chosen_without_native_kernels(
    form: str, mask: str, dropout: float, length: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    shape = (2, 2, length, length)
    logits, attention_mask = make_form(form, *shape, torch.float32), make_mask(mask, *shape, torch.float32)
    assert (
        choose_route(Terms.of(logits, attention_mask), torch.randn(2, 2, length, 4), attention_mask, dropout) == route
    )


def test_training_leaves_tables_to_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for whole ones of bfloat16, in batches of several rows with more than a few tokens."""

    def route(rows: int, dtype: torch.dtype = torch.float32, form: str = "static") -> str:
        logits, value = make_form(form, rows, 2, 8, 8, dtype), torch.randn(rows, 2, 8, 4, dtype=dtype)
        return choose_route(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.0)

    monkeypatch.setattr(static, "FEW_TOKENS", 16)
    with monkeypatch.context() as patch:
        patch.setattr(native, "serves", lambda *_: True)
        patch.setitem(ROUTES, "native", ROUTES["native"]._replace(serves=lambda *_: True))
        assert [route(rows) for rows in (2, 3)] == ["native", "native"]
        assert [route(rows, torch.bfloat16) for rows in (2, 3)] == ["native", "static"]
        assert route(3, torch.bfloat16, "static_product") == "native"
        patch.setattr(static, "FEW_TOKENS", 0)
        assert [route(rows, torch.bfloat16) for rows in (1, 2)] == ["native", "static"]
        with torch.no_grad():
            assert route(2) == "static"
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    assert route(2) == "static"


def test_low_rank_forms_take_the_stock_kernel_where_its_library_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of keys, which wants a gradient, stands among them as one more column."""
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    logits, value = make_form("biased", 2, 2, 300, 300, torch.float32), torch.randn(2, 2, 300, 4)
    for fast, route in ((False, "chunked"), (True, "sdpa")):
        monkeypatch.setattr(sdpa, "default_library_is_fast", lambda fast=fast: fast)
        assert choose_route(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.0) == route
    with monkeypatch.context() as patch:
        patch.setattr(KernelTerms, "logits", None)  # whoever asked for a bias of the size of a mask would call it
        actual = attend(logits, value)[0]
    reference_output = reference.reference_attention(logits, value, AttentionMask())[0]
    torch.testing.assert_close(actual, reference_output, rtol=1e-5, atol=1e-5)
    inputs = leaves(logits)
    for grad, expected in zip(
        torch.autograd.grad(actual.square().sum(), inputs),
        torch.autograd.grad(reference_output.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "route"), [("low_rank", "sdpa"), ("tiled", "chunked"), ("salience", "chunked")])
def test_short_sequences_take_a_fast_route_without_a_gradient(
    form: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    logits = make_form(form, 2, 2, 8, 8, torch.float32)
    with torch.no_grad():
        assert choose_route(Terms.of(logits, AttentionMask()), torch.randn(2, 2, 8, 4), AttentionMask(), 0.0) == route


def test_a_table_or_salience_of_great_range_takes_the_stable_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    keep = key_mask(3, 6, "right").bool()[:, None, None, :]
    value = torch.randn(3, 2, 6, 4)
    for logits in (
        Static(torch.randn(2, 6, 6) * 100),
        Sum([(None, Static(torch.randn(2, 6, 6))), (None, KeyBias(torch.randn(3, 2, 1, 6) * 100, 6))]),
    ):
        mask = AttentionMask(keep)
        with torch.no_grad():
            assert choose_route(Terms.of(logits, mask), value, mask, 0.0) == "chunked"
            torch.testing.assert_close(
                attend(logits, value, mask)[0], reference.reference_attention(logits, value, mask)[0]
            )


def test_the_debug_log_tells_the_route(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="hf_synthesizer.attend")
    with torch.no_grad():
        SynthesizerAttention(8, 2, variant="random", max_length=4)(torch.randn(1, 4, 8), need_weights=False)
    assert "Static logits for values (1, 2, 4, 4): route static" in caplog.text


def test_masks_are_taken_apart_once() -> None:
    keys = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()[:, None, None, :]
    square = keys.expand(2, 1, 4, 4).contiguous()
    mask = AttentionMask.from_tensor(square).simplified()
    assert torch.equal(mask.keep, keys) and mask.causal_offset is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionMask, "_read_structure", None)  # a second read would call it
        assert torch.equal(AttentionMask.from_tensor(square).simplified().keep, keys)
    square[0, ..., -1] = False
    assert not AttentionMask.from_tensor(square).simplified().keep[0, ..., -1].any()
    triangle = torch.ones(2, 1, 3, 5).tril(2).bool()
    mask = AttentionMask.from_tensor(triangle).simplified()
    assert mask.keep is None and mask.causal_offset == 2
    scattered = torch.tensor([[1, 0], [0, 1]]).bool()[None, None]
    assert AttentionMask.from_tensor(scattered).simplified().keep is scattered


def test_masks_of_inference_mode_are_taken_apart_each_time() -> None:
    """Such tensors have no version that would tell of a change."""
    with torch.inference_mode():
        square = torch.ones(2, 1, 4, 4, dtype=torch.bool)
        square[1, ..., -1] = False
        for _ in range(2):
            mask = AttentionMask.from_tensor(square).simplified()
            assert torch.equal(mask.keep, square[:, :, :1])
            square[0, ..., -1] = False


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5), (200, 128, 100), (150, 300, 64)])
def test_products(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inner, columns = shape
    a = torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
    torch.testing.assert_close(matmul.product(a, b), a @ b, rtol=1e-4, atol=1e-4)
    strided = torch.randn(inner, 2 * columns)[:, ::2]
    torch.testing.assert_close(matmul.product(a, strided), a @ strided, rtol=1e-4, atol=1e-4)
    batch = torch.randn(1, rows, inner)
    torch.testing.assert_close(matmul.product(batch, b[None]), batch @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["random", "random+salience", "dense", "factorized_dense", "random+dot_product"])
def test_functional_transforms(variant: str) -> None:
    """torch.func takes gradients without our own backward."""
    layer, x = SynthesizerAttention(8, 2, variant=variant, max_length=6), torch.randn(2, 5, 8)
    keep = torch.ones(2, 5, dtype=torch.long)
    keep[1, 3:] = 0

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        call = torch.func.functional_call(layer, parameters, (x, keep), {"need_weights": False})
        return call[0].pow(2).sum()

    parameters = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    grads = torch.func.grad(loss)(parameters)
    layer(x, keep, need_weights=False)[0].pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_projections_equal_the_module(bias: bool, needs: tuple[bool, bool]) -> None:
    module = torch.nn.Linear(192, 160, bias=bias)
    tensor = torch.randn(3, 40, 192)[:, 1:].transpose(0, 1).requires_grad_(needs[0])  # (39, 3, 192), not contiguous
    module.weight.requires_grad_(needs[1])
    output, expected = matmul.linear(module, tensor), module(tensor)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    if matmul._LINEAR is not None:
        assert "Projection" in str(output.grad_fn)
    leaves = [leaf for leaf in (tensor, *module.parameters()) if leaf.requires_grad]
    upstream = torch.randn_like(output)
    for one, other in zip(
        torch.autograd.grad(output, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_projection_that_is_more_than_a_matrix_is_called() -> None:
    tensor = torch.randn(64, 192, requires_grad=True)

    def plain(module: torch.nn.Module, tensor: torch.Tensor = tensor) -> bool:
        return "Projection" in str(matmul.linear(module, tensor).grad_fn)

    linear = torch.nn.Linear(192, 192)
    assert plain(linear) == (matmul._LINEAR is not None)
    assert not plain(linear.double(), tensor.double())
    assert not plain(linear.float(), torch.randn(2, 192, requires_grad=True))  # too small to be worth it
    calls: list[object] = []
    hook = linear.register_forward_hook(lambda *seen: calls.append(seen))
    assert not plain(linear) and len(calls) == 1
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(linear, tensor).dtype == torch.bfloat16
    assert not plain(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(192, 192)))
    replaced = torch.nn.Linear(192, 192)
    replaced.forward = lambda tensor: calls.append(tensor) or tensor  # type: ignore[method-assign]
    assert not plain(replaced) and len(calls) == 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_projections_backward(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, for which oneDNN is never asked, so that the plain product stands in for it."""
    monkeypatch.setattr(matmul, "_LINEAR", lambda x, weight, bias, *_: torch.nn.functional.linear(x, weight, bias))
    inputs = [torch.randn(*shape).double().requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(matmul.Projection.apply, (*inputs[:2], inputs[2] if bias else None))
