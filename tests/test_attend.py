"""Each fast route equals the reference: any sum of forms, mask, length, dtype and stride, forward and backward."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_synthesizer import SynthesizerAttention, gemm
from hf_synthesizer.attend import attend, blocks, choose_route, native, reference, sdpa, static, tiled
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits import Explicit, KeyBias, Logits, LowRank, Placed, Static, Sum, Tiled
from hf_synthesizer.masks import AttentionMask
from tests.models import mask as key_mask

FORMS = ("static", "static_product", "low_rank", "low_rank_shared", "biased", "tiled", "salience", "explicit")
FORMS += ("placed_table", "placed_columns")
MASKS = ("none", "right", "left", "full", "causal", "causal-left", "scattered", "bias", "position")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2}


def make_form(name: str, batch: int, heads: int, query: int, key: int, dtype: torch.dtype) -> Logits:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).div(2).to(dtype).requires_grad_()

    if name == "static":
        return Static(tensor(heads, query + 2, key + 3)[:, :query, :key])  # strided, as the slice of a longer table
    if name == "static_product":
        return Static(tensor(heads, query + 2, 3)[:, :query], tensor(heads, key, 3))
    if name == "low_rank":
        return LowRank(tensor(batch, query, heads, 4).transpose(1, 2), tensor(batch, key, heads, 4).transpose(1, 2))
    if name == "low_rank_shared":
        return LowRank(tensor(batch, heads, query, 4), tensor(1, heads, key, 4))
    if name == "biased":
        return LowRank(tensor(batch, heads, query, 4), tensor(1, heads, key, 4), tensor(1, heads, key))
    if name == "tiled":
        return Tiled(tensor(batch, heads, query, 3), tensor(batch, heads, query, -(-key // 3)), key)
    if name == "salience":
        return KeyBias(tensor(batch, heads, 1, key), query)
    if name == "placed_table":
        places = [torch.randint(0, 4, (batch, length)) for length in (key, query)]
        return Placed(Static(tensor(heads, 4, 4)), *places)
    if name == "placed_columns":
        made = Tiled(tensor(batch, heads, query, 3), tensor(batch, heads, query, 2), 5)
        return Placed(made, torch.randint(0, 5, (batch, key)))
    return Explicit(tensor(batch, heads, query, key))


def make_logits(names: list[str], weighted: bool, *shape, dtype: torch.dtype) -> Logits:
    forms = [make_form(name, *shape, dtype) for name in names]
    if len(forms) == 1 and not weighted:
        return forms[0]
    heads = shape[1]
    return Sum([(torch.randn(heads, dtype=dtype, requires_grad=True) if weighted else None, form) for form in forms])


def make_mask(name: str, batch: int, heads: int, query: int, key: int, dtype: torch.dtype) -> AttentionMask:
    if name in ("right", "left", "full"):
        keep = key_mask(batch, key, name).bool()[:, None, None, :]
        return AttentionMask.from_tensor(keep.expand(batch, 1, query, key).contiguous()).simplified()
    if name == "causal":
        return AttentionMask(causal_offset=key - query)
    if name == "causal-left":
        keep = key_mask(batch, key, "left").bool()[:, None, None, :] & torch.ones(query, key).tril(key - query).bool()
        return AttentionMask.from_tensor(keep).simplified()
    if name == "scattered":
        return AttentionMask.from_tensor(torch.rand(batch, 1, query, key) > 0.4)
    if name == "bias":
        return AttentionMask.from_tensor(torch.randn(batch, 1, query, key, dtype=dtype))
    if name == "position":
        return AttentionMask(bias=torch.randn(1, heads, query, key, dtype=dtype, requires_grad=True))
    return AttentionMask()


def leaves(*objects) -> list[torch.Tensor]:
    """All tensors that want a gradient behind forms, masks and values, in a fixed order."""
    found: list[torch.Tensor] = []
    for item in objects:
        if isinstance(item, torch.Tensor):
            while item._base is not None:
                item = item._base
            found += [item] if item.requires_grad else []
        elif isinstance(item, (list, tuple)):
            found += leaves(*item)
        elif isinstance(item, (Logits, AttentionMask)):
            found += leaves(*vars(item).values())
    return found


@st.composite
def problems(draw):
    query = draw(st.integers(1, 9))
    return {
        "names": draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3, unique=True)),
        "weighted": draw(st.booleans()),
        "mask": draw(st.sampled_from(MASKS)),
        "shape": (draw(st.integers(1, 3)), draw(st.integers(1, 5)), query, query + draw(st.integers(0, 4))),
        "width": draw(st.sampled_from([3, 4, 6])),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "rows": draw(st.sampled_from([2, 3, 512])),
        "tile": draw(st.sampled_from([8, 100, 1 << 18])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems())
def test_fast_routes_equal_the_reference(problem) -> None:
    torch.manual_seed(problem["seed"])
    shape, dtype = problem["shape"], problem["dtype"]
    logits = make_logits(problem["names"], problem["weighted"], *shape, dtype=dtype)
    mask = make_mask(problem["mask"], *shape, dtype)
    batch, heads, _, key = shape
    value = torch.randn(batch, key, heads, problem["width"], dtype=dtype, requires_grad=True).transpose(1, 2)
    inputs = leaves(logits, mask, value)
    expected, _ = reference.attend(logits, value, mask)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    terms = Terms.of(logits, mask)
    tolerance = TOLERANCE[dtype]
    scale = max(1.0, float(expected.detach().abs().max()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ROWS", problem["rows"])
        patch.setattr(static, "_ROWS", problem["rows"])
        patch.setattr(blocks, "TILE", problem["tile"])
        for name, route in {"static": static, "native": native, "tiled": tiled, "sdpa": sdpa}.items():
            if not route.serves(terms, value, mask, 0.0):
                continue
            actual = route.attend(terms, value, mask)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale, msg=name)
            with torch.no_grad():
                quiet = route.attend(Terms.of(logits, mask), value, mask)
            torch.testing.assert_close(quiet, expected.detach(), rtol=tolerance, atol=tolerance * scale)
            grads = torch.autograd.grad(actual, inputs, upstream, allow_unused=True, retain_graph=True)
            for grad, wanted in zip(grads, expected_grads, strict=True):
                if wanted is not None:
                    size = max(1.0, float(wanted.abs().max()))
                    loose = 10 * tolerance * size if dtype != torch.bfloat16 else 0.1 * size
                    torch.testing.assert_close(grad, wanted, rtol=10 * tolerance, atol=loose)


@pytest.mark.parametrize("mask", ["none", "causal", "right", "position"])
@pytest.mark.parametrize(
    "names", [["static"], ["static", "salience"], ["low_rank", "static"], ["tiled"], ["biased", "tiled"]]
)
def test_gradcheck_in_float64(names: list[str], mask: str) -> None:
    shape = (2, 2, 4, 5)
    logits, made = make_logits(names, True, *shape, dtype=torch.float64), make_mask(mask, *shape, torch.float64)
    value = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    inputs = tuple(leaves(logits, made, value))
    for route in (static, tiled):
        if route.serves(Terms.of(logits, made), value, made, 0.0):
            assert torch.autograd.gradcheck(lambda *_: route.attend(Terms.of(logits, made), value, made), inputs)  # noqa: B023


def test_dropout_of_the_tiled_route_is_the_same_in_forward_and_backward() -> None:
    """The output is linear in the values, so its gradient shows the very weights that the forward used."""
    logits = LowRank(torch.randn(2, 3, 6, 4), torch.randn(1, 3, 7, 4))
    value = torch.randn(2, 3, 7, 5, dtype=torch.float32, requires_grad=True)
    output = tiled.attend(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.5)
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
        ("static", "none", 0.1, 200, "tiled"),
        ("static", "scattered", 0.0, 8, "reference"),
        ("static", "scattered", 0.0, 200, "tiled"),
        ("low_rank", "none", 0.0, 8, "reference"),
        ("low_rank", "none", 0.0, 200, "sdpa"),
        ("low_rank", "none", 0.0, 300, "tiled"),
        ("low_rank", "right", 0.1, 8, "reference"),
        ("low_rank", "right", 0.1, 200, "tiled"),
        ("tiled", "none", 0.0, 8, "reference"),
        ("tiled", "none", 0.0, 80, "tiled"),
        ("salience", "none", 0.0, 200, "tiled"),
        ("explicit", "none", 0.0, 200, "tiled"),
        ("static", "none", 0.0, 1, "reference"),
        ("low_rank", "none", 0.0, 1, "reference"),
    ],
)
def test_the_rules_by_which_a_route_is_chosen_without_native_kernels(
    form: str, mask: str, dropout: float, length: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    shape = (2, 2, length, length)
    logits, made = make_form(form, *shape, torch.float32), make_mask(mask, *shape, torch.float32)
    assert choose_route(Terms.of(logits, made), torch.randn(2, 2, length, 4), made, dropout) == route


def test_training_on_few_tokens_leaves_tables_to_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(rows: int) -> str:
        logits, value = make_form("static", rows, 2, 8, 8, torch.float32), torch.randn(rows, 2, 8, 4)
        return choose_route(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.0)

    monkeypatch.setattr(static, "FEW_TOKENS", 16)
    with monkeypatch.context() as patch:
        patch.setattr(native, "serves", lambda *_: True)
        assert [route(rows) for rows in (2, 3)] == ["native", "static"]
        with torch.no_grad():
            assert route(2) == "static"
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    assert route(2) == "static"


def test_low_rank_forms_take_the_stock_kernel_where_its_library_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of keys, which wants a gradient, stands among them as one more column."""
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    logits, value = make_form("biased", 2, 2, 300, 300, torch.float32), torch.randn(2, 2, 300, 4)
    for fast, route in ((False, "tiled"), (True, "sdpa")):
        monkeypatch.setattr(tiled, "default_library_is_fast", lambda fast=fast: fast)
        assert choose_route(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.0) == route
    with monkeypatch.context() as patch:
        patch.setattr(Terms, "joined_bias", None)  # whoever asked for a bias of the size of a mask would call it
        found = attend(logits, value)[0]
    wanted = reference.attend(logits, value, AttentionMask())[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    inputs = leaves(logits)
    for grad, expected in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "route"), [("low_rank", "sdpa"), ("tiled", "tiled"), ("salience", "tiled")])
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
            assert choose_route(Terms.of(logits, mask), value, mask, 0.0) == "tiled"
            torch.testing.assert_close(attend(logits, value, mask)[0], reference.attend(logits, value, mask)[0])


def test_the_debug_log_tells_the_route(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="hf_synthesizer.attend")
    with torch.no_grad():
        SynthesizerAttention(8, 2, variant="random", max_length=4)(torch.randn(1, 4, 8), need_weights=False)
    assert "Static logits for values (1, 2, 4, 4): route static" in caplog.text


def test_masks_are_taken_apart_once() -> None:
    keys = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()[:, None, None, :]
    square = keys.expand(2, 1, 4, 4).contiguous()
    made = AttentionMask.from_tensor(square).simplified()
    assert torch.equal(made.keep, keys) and made.causal_offset is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionMask, "_answer", None)  # whoever asks again would call it
        assert torch.equal(AttentionMask.from_tensor(square).simplified().keep, keys)
    square[0, ..., -1] = False
    assert not AttentionMask.from_tensor(square).simplified().keep[0, ..., -1].any()
    triangle = torch.ones(2, 1, 3, 5).tril(2).bool()
    made = AttentionMask.from_tensor(triangle).simplified()
    assert made.keep is None and made.causal_offset == 2
    scattered = torch.tensor([[1, 0], [0, 1]]).bool()[None, None]
    assert AttentionMask.from_tensor(scattered).simplified().keep is scattered


def test_masks_of_inference_mode_are_taken_apart_each_time() -> None:
    """Such tensors have no version that would tell of a change."""
    with torch.inference_mode():
        square = torch.ones(2, 1, 4, 4, dtype=torch.bool)
        square[1, ..., -1] = False
        for _ in range(2):
            made = AttentionMask.from_tensor(square).simplified()
            assert torch.equal(made.keep, square[:, :, :1])
            square[0, ..., -1] = False


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5), (200, 128, 100), (150, 300, 64)])
def test_products(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inner, columns = shape
    a = torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
    torch.testing.assert_close(gemm.product(a, b), a @ b, rtol=1e-4, atol=1e-4)
    strided = torch.randn(inner, 2 * columns)[:, ::2]
    torch.testing.assert_close(gemm.product(a, strided), a @ strided, rtol=1e-4, atol=1e-4)
    batch = torch.randn(1, rows, inner)
    torch.testing.assert_close(gemm.product(batch, b[None]), batch @ b, rtol=1e-4, atol=1e-4)


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
    made, expected = gemm.linear(module, tensor), module(tensor)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    if gemm._LINEAR is not None:
        assert "Projection" in str(made.grad_fn)
    leaves = [leaf for leaf in (tensor, *module.parameters()) if leaf.requires_grad]
    upstream = torch.randn_like(made)
    for one, other in zip(
        torch.autograd.grad(made, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_projection_that_is_more_than_a_matrix_is_called() -> None:
    tensor = torch.randn(64, 192, requires_grad=True)

    def plain(module: torch.nn.Module, tensor: torch.Tensor = tensor) -> bool:
        return "Projection" in str(gemm.linear(module, tensor).grad_fn)

    linear = torch.nn.Linear(192, 192)
    assert plain(linear) == (gemm._LINEAR is not None)
    assert not plain(linear.double(), tensor.double())
    assert not plain(linear.float(), torch.randn(2, 192, requires_grad=True))  # too small to be worth it
    calls: list[object] = []
    hook = linear.register_forward_hook(lambda *seen: calls.append(seen))
    assert not plain(linear) and len(calls) == 1
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert gemm.linear(linear, tensor).dtype == torch.bfloat16
    assert not plain(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(192, 192)))
    replaced = torch.nn.Linear(192, 192)
    replaced.forward = lambda tensor: calls.append(tensor) or tensor  # type: ignore[method-assign]
    assert not plain(replaced) and len(calls) == 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_projections_backward(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, for which oneDNN is never asked, so that the plain product stands in for it."""
    monkeypatch.setattr(gemm, "_LINEAR", lambda x, weight, bias, *_: torch.nn.functional.linear(x, weight, bias))
    inputs = [torch.randn(*shape).double().requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(gemm.Projection.apply, (*inputs[:2], inputs[2] if bias else None))
