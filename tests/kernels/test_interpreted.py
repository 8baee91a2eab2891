"""The Triton kernels, in Triton's interpreter, against the reference: `make test-kernels`."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from hf_synthesizer import SynthesizerAttention
from hf_synthesizer.attend import as_accelerator, attend, choose_route, reference, triton
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.attend.triton import blocks
from hf_synthesizer.attend.triton.blocks import Blocks
from hf_synthesizer.logits.forms import Logits, LowRank, Static, Sum, Tiled
from hf_synthesizer.logits.masks import AttentionMask
from tests.helpers.problems import leaves, make_form, make_logits, make_mask

pytestmark = pytest.mark.kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
FORMS = ("static", "static_product", "low_rank", "low_rank_shared", "biased", "tiled", "salience")
PAIRS = [list(pair) for pair in itertools.combinations(FORMS, 2)]
MASKS = ("none", "right", "left", "full", "causal", "causal-left", "position")
SHAPE = (2, 2, 19, 21)  # rows of the batch, heads, queries and keys: several small tiles, the last of them not full
SMALL = Blocks(16, 16, 4, 1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of short sequences, which the interpreter would need long for otherwise."""
    monkeypatch.setattr(blocks, "BLOCKS", dict.fromkeys(blocks.BLOCKS, SMALL))


def require_equal(
    logits: Logits, mask: AttentionMask, value: torch.Tensor, kept: torch.Tensor | None = None, dropout: float = 0.0
) -> None:
    """Output and all gradients are the reference's; with dropout, the reference's for the weights that are `kept`."""
    inputs = leaves(logits, mask, value)
    expected, weights = reference.reference_attention(logits, value, mask)
    if kept is not None:
        expected = (weights * kept / (1 - dropout)).to(value.dtype) @ value
    terms = Terms.of(logits, mask)
    assert triton.fits(terms, value, mask, dropout)
    actual = triton.triton_attention(terms, value, mask, dropout)
    assert actual.dtype == value.dtype and actual.shape == expected.shape
    tolerance = TOLERANCE[value.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance * max(1, float(expected.detach().abs().max()))
    )
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(actual, inputs, upstream, allow_unused=True)
    wanted = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    for grad, known in zip(grads, wanted, strict=True):
        if known is not None:
            size = max(1.0, float(known.abs().max()))
            torch.testing.assert_close(grad, known, rtol=10 * tolerance, atol=2 * tolerance * size)


def make_value(batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, length, heads, width, dtype=dtype, requires_grad=True).transpose(1, 2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", FORMS)
def test_each_term_under_each_mask(name: str, mask: str, small_blocks: None) -> None:
    logits, attention_mask = (
        make_logits([name], False, *SHAPE, dtype=torch.float32),
        make_mask(mask, *SHAPE, torch.float32),
    )
    require_equal(logits, attention_mask, make_value(2, 2, 21, 20, torch.float32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("names", "mask"),
    [*zip([*PAIRS, [*FORMS]], itertools.cycle(MASKS), strict=False)],
    ids=lambda part: "+".join(part) if isinstance(part, list) else part,
)
def test_each_pair_of_terms_in_each_dtype(names: list[str], mask: str, dtype: torch.dtype, small_blocks: None) -> None:
    logits, attention_mask = make_logits(names, True, *SHAPE, dtype=dtype), make_mask(mask, *SHAPE, dtype)
    require_equal(logits, attention_mask, make_value(2, 2, 21, 20, dtype))


@pytest.mark.parametrize(("a", "b"), [(1, 21), (21, 1), (5, 5), (16, 2)])
def test_factors_of_any_size(a: int, b: int, small_blocks: None) -> None:
    inner, outer = (torch.randn(2, 2, 19, width, requires_grad=True) for width in (a, b))
    require_equal(Tiled(inner, outer, 21), AttentionMask(causal_offset=2), make_value(2, 2, 21, 16, torch.float32))


@pytest.mark.parametrize(("rank", "width"), [(3, 100), (129, 5), (256, 256)])
def test_widths_of_any_size(rank: int, width: int) -> None:
    query, key = (torch.randn(1, 2, 9, rank, requires_grad=True) for _ in range(2))
    query, key = query / rank, key
    require_equal(LowRank(query, key), AttentionMask(), make_value(1, 2, 9, width, torch.float32))


@pytest.mark.parametrize("name", ["static", "low_rank", "tiled"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_blocks_that_are_launched(name: str, dtype: torch.dtype) -> None:
    shape = (1, 1, 70, 75)
    logits, mask = make_logits([name], True, *shape, dtype=dtype), make_mask("causal", *shape, dtype)
    require_equal(logits, mask, make_value(1, 1, 75, 64, dtype))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 40), (40, 3), (3, 40)], ids=str)
def test_lengths_of_any_size(lengths: tuple[int, int], small_blocks: None) -> None:
    """More queries than keys, too: then the first queries of a triangle see nothing, and their output is 0."""
    shape = (2, 2, *lengths)
    logits = make_logits(["static", "low_rank", "tiled"], True, *shape, dtype=torch.float32)
    require_equal(
        logits, AttentionMask(causal_offset=lengths[1] - lengths[0]), make_value(2, 2, lengths[1], 8, torch.float32)
    )


def test_heads_that_share_a_table(small_blocks: None) -> None:
    table = torch.randn(1, 19, 21, requires_grad=True)
    require_equal(Static(table), AttentionMask(), make_value(2, 2, 21, 8, torch.float32))


@pytest.mark.parametrize("mask", ["none", "causal-left"])
@pytest.mark.parametrize("names", [["static"], ["low_rank"], ["tiled"], ["static", "biased", "tiled"]], ids="+".join)
def test_forward_and_backward_drop_the_same_weights(names: list[str], mask: str, small_blocks: None) -> None:
    """Values that are an identity show which weights are dropped; with these, output and all gradients are known."""
    logits, attention_mask = (
        make_logits(names, True, *SHAPE, dtype=torch.float32),
        make_mask(mask, *SHAPE, torch.float32),
    )
    torch.manual_seed(3)
    with torch.no_grad():
        eye = torch.eye(21).expand(2, 2, -1, -1)
        weights = triton.triton_attention(Terms.of(logits, attention_mask), eye, attention_mask, 0.3)
        visible = triton.triton_attention(Terms.of(logits, attention_mask), eye, attention_mask) > 0
    kept = weights != 0
    assert abs(kept[visible].float().mean() - 0.7) < 0.05
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[:, 0], kept[:, 1])
    value = make_value(2, 2, 21, 20, torch.float32)
    torch.manual_seed(3)
    require_equal(logits, attention_mask, value, kept, 0.3)


def test_dropout_follows_the_seed(small_blocks: None) -> None:
    logits, value = make_form("tiled", *SHAPE, torch.float32), torch.randn(2, 2, 21, 8)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return triton.triton_attention(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.5)

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


def test_autocast_casts_as_on_the_reference(small_blocks: None) -> None:
    logits, mask = make_logits(["static", "low_rank"], True, *SHAPE, dtype=torch.float32), AttentionMask()
    value = make_value(2, 2, 21, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference.reference_attention(logits, value, mask)[0]
        actual = triton.triton_attention(Terms.of(logits, mask), value, mask)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(actual)
    inputs = leaves(logits, value)
    for grad, known in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (actual, expected)), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, known, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_every_variant_trains_through_the_kernels(
    variant: str, causal: bool, small_blocks: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="hf_synthesizer.attend")
    layer = SynthesizerAttention(16, 2, variant=variant, max_length=24)
    hidden_states = torch.randn(2, 21, 16)
    mask = torch.tensor([[1] * 21, [1] * 13 + [0] * 8])

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        output, _ = layer(hidden_states, mask, is_causal=causal, need_weights=False)
        output[mask.bool()].square().sum().backward()
        return [output[mask.bool()], *(p.grad for p in layer.parameters() if p.grad is not None)]

    expected = run()
    caplog.clear()
    with as_accelerator():
        actual = run()
    route = caplog.text.split()[-1]
    assert (
        route in ("triton", "sdpa") if variant.startswith("dot_product") else route in ("triton", "sparse", "chunked")
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "dropout", "mask", "dtype", "route"),
    [
        ("tiled", 0.0, "none", torch.float32, "triton"),
        ("tiled", 0.1, "right", torch.float16, "triton"),
        ("static", 0.1, "none", torch.bfloat16, "triton"),
        ("static", 0.0, "right", torch.float16, "triton"),
        ("biased", 0.1, "causal-left", torch.float32, "triton"),
        ("static", 0.0, "none", torch.float32, "static"),
        ("low_rank", 0.0, "none", torch.float32, "sdpa"),
        ("tiled", 0.0, "scattered", torch.float32, "chunked"),
        ("explicit", 0.0, "none", torch.float32, "chunked"),
        ("tiled", 0.0, "none", torch.float64, "chunked"),
        ("tiled", 1.0, "none", torch.float32, "chunked"),
    ],
)
def test_what_the_kernels_serve(form: str, dropout: float, mask: str, dtype: torch.dtype, route: str) -> None:
    shape = (2, 2, 8, 8)
    logits, attention_mask = make_form(form, *shape, dtype), make_mask(mask, *shape, dtype)
    terms, value = Terms.of(logits, attention_mask), torch.randn(2, 2, 8, 4, dtype=dtype)
    with as_accelerator():
        assert choose_route(terms, value, attention_mask, dropout) == route


def test_the_environment_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_TRITON", "0")
    logits, value = make_form("tiled", 2, 2, 8, 8, torch.float32), torch.randn(2, 2, 8, 4)
    with as_accelerator():
        assert choose_route(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.0) == "chunked"


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_fails_its_check_is_left_out_with_one_warning(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_synthesizer.attend.triton import check

    warnings: list[str] = []

    def broken(terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no ptxas")
        return triton.triton_attention(terms, value, mask, dropout) * 1.01

    monkeypatch.setattr(check, "launch_attention", broken)
    monkeypatch.setattr(check.logger, "warning", warnings.append)
    check.passes_check.cache_clear()
    logits = make_form("tiled", 2, 2, 8, 8, torch.float32)
    value, mask = torch.randn(2, 2, 8, 4), AttentionMask()
    try:
        with as_accelerator():
            for _ in range(2):
                torch.testing.assert_close(
                    attend(logits, value)[0], reference.reference_attention(logits, value, mask)[0]
                )
                assert choose_route(Terms.of(logits, mask), value, mask, 0.0) == "chunked"
    finally:
        check.passes_check.cache_clear()
    (warning,) = warnings
    assert ("no ptxas" if fault == "raises" else "differs from the reference by") in warning
    assert "HF_SYNTHESIZER_TRITON=0" in warning


@pytest.mark.parametrize("names", [["static"], ["low_rank", "static"], ["salience"], ["static_product"]], ids="+".join)
def test_nothing_as_large_as_all_logits_is_made(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At length 2048, forward and backward; the kernels, which make no tensors, are left out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hf_synthesizer.attend.triton import launch

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (list, tuple)) else [made]:
                if isinstance(tensor, torch.Tensor):
                    held = tensor.untyped_storage().nbytes() // tensor.itemsize
                    self.numbers = max(self.numbers, min(held, tensor.numel()))  # views hold what is there already
            return made

    monkeypatch.setattr(launch, "call_kernel", lambda *arguments: None)
    shape = (12, 1, 2048, 2048)
    logits, mask = (
        make_logits(names, names != ["salience"], *shape, dtype=torch.float32),
        make_mask("right", *shape, torch.float32),
    )
    if names == ["salience"]:  # and an outer product of the size that `factorized_dense` gives it
        factors = (torch.randn(12, 1, 2048, size, requires_grad=True) for size in (64, 32))
        logits = Sum([(None, logits), (None, Tiled(*factors, 2048))])
    value = make_value(12, 1, 2048, 64, torch.float32)
    with Largest() as largest:
        output = triton.triton_attention(Terms.of(logits, mask), value, mask, 0.1)
        torch.autograd.grad(output.sum(), leaves(logits, value), allow_unused=True)
    assert 0 < largest.numbers < 12 * 1 * 2048 * 2048 / 10
