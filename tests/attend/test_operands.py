"""What attention is given fits together, or is refused before a kernel reads it: masks of every shape, and all other tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import BertConfig, BertModel

from hf_synthesizer import SynthesizerAttention, patch_model
from hf_synthesizer.attend import attend, native, reference
from hf_synthesizer.attend.native import operands
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.errors import AttentionInputError
from hf_synthesizer.logits.forms import Explicit, KeyBias, Logits, LowRank, Static, Sum, Tiled
from hf_synthesizer.logits.masks import AttentionMask

BATCH, HEADS, LENGTH = 3, 4, 40
BROADCAST = [
    (BATCH, 1, LENGTH, 1),
    (BATCH, 1, 1, 1),
    (1, 1, LENGTH, 1),
    (1, 1, 1, 1),
    (1, HEADS, 1, 1),
    (BATCH, HEADS, LENGTH, 1),
    (1, 1, LENGTH, LENGTH),
    (BATCH, HEADS, 1, LENGTH),
]
WRONG = {
    "too few keys": (BATCH, 1, LENGTH, LENGTH - 7),
    "too many keys": (BATCH, 1, LENGTH, LENGTH + 7),
    "too few queries": (BATCH, 1, LENGTH - 7, LENGTH),
    "too many queries": (BATCH, 1, LENGTH + 7, LENGTH),
    "too few rows": (BATCH - 1, 1, LENGTH, LENGTH),
    "too many rows": (BATCH + 1, 1, 1, LENGTH),
    "other heads": (BATCH, 2, LENGTH, LENGTH),
    "five dimensions": (1, BATCH, 1, LENGTH, LENGTH),
}
compiled = pytest.mark.compiler


FORMS = {
    "table": lambda: Static(torch.randn(HEADS, LENGTH, LENGTH)),
    "factors": lambda: Static(torch.randn(HEADS, LENGTH, 4), torch.randn(HEADS, LENGTH, 4)),
    "low_rank": lambda: LowRank(torch.randn(BATCH, HEADS, LENGTH, 4), torch.randn(BATCH, HEADS, LENGTH, 4)),
    "tiled": lambda: Tiled(torch.randn(BATCH, HEADS, LENGTH, 8), torch.randn(BATCH, HEADS, LENGTH, 5), LENGTH),
    "salience": lambda: KeyBias(torch.randn(BATCH, HEADS, 1, LENGTH), LENGTH),
    "explicit": lambda: Explicit(torch.randn(BATCH, HEADS, LENGTH, LENGTH)),
}


@pytest.fixture(params=["native", "others"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the native kernels, where there are any, and without."""
    if request.param == "native":
        yield
    else:
        with native.without_kernels():
            yield


def made_mask(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    keep = torch.rand(shape) > 0.4
    if kind == "bool":
        return keep
    return torch.zeros(shape).masked_fill(~keep, torch.finfo(torch.float32).min) + torch.randn(shape) * keep


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_broadcasts_means_what_it_is_broadcast_to(
    form: str, shape: tuple[int, ...], kind: str, kernels: None
) -> None:
    torch.manual_seed(0)
    logits, value, mask = FORMS[form](), torch.randn(BATCH, HEADS, LENGTH, 8), made_mask(shape, kind)
    whole = AttentionMask.from_tensor(mask.expand(BATCH, HEADS, LENGTH, LENGTH).contiguous())
    expected = reference.reference_attention(logits, value, whole)[0]
    for need_weights in (False, True):
        actual = attend(logits, value, AttentionMask.from_tensor(mask), need_weights=need_weights)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_another_shape_is_refused(form: str, wrong: str, kernels: None) -> None:
    logits, value = FORMS[form](), torch.randn(BATCH, HEADS, LENGTH, 8)
    for kind in ("bool", "additive"):
        mask = AttentionMask.from_tensor(made_mask(WRONG[wrong], kind))
        for need_weights in (False, True):
            with pytest.raises(
                AttentionInputError, match=r"mask has shape .* does not broadcast to .*\(3, 4, 40, 40\)"
            ):
                attend(logits, value, mask, need_weights=need_weights)


def bert(implementation: str = "sdpa") -> BertModel:
    config = BertConfig(
        hidden_size=32, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=32, vocab_size=50
    )
    torch.manual_seed(0)
    return BertModel._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("variant", ["random", "dense", "factorized_dense+salience", "factorized_random+dot_product"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [*WRONG.values()][:-1], ids=[*WRONG][:-1])
def test_a_mask_of_too_few_rows_is_refused_as_by_the_stock_model(
    shape: tuple[int, ...], implementation: str, variant: str
) -> None:
    model, tokens = bert(implementation), torch.randint(0, 50, (BATCH, LENGTH))
    mask = made_mask(shape, "additive")
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            model(tokens, attention_mask=mask)
        patch_model(model, variant, max_length=LENGTH)
        with pytest.raises(AttentionInputError, match="does not broadcast"):
            model(tokens, attention_mask=mask)


@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_a_model_that_compares_tokens_reads_broadcast_masks_as_the_stock_one(shape: tuple[int, ...]) -> None:
    model, tokens, mask = bert(), torch.randint(0, 50, (BATCH, LENGTH)), made_mask(shape, "additive")
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).last_hidden_state
        patch_model(model, "dot_product", max_length=LENGTH)
        actual = model(tokens, attention_mask=mask).last_hidden_state
    seen = (mask > -1e30).expand(BATCH, HEADS, LENGTH, LENGTH).any(-1).all()  # stock gives a blind query a mean
    if seen:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    else:
        assert actual.isfinite().all()


def test_a_mask_of_fewer_dimensions_is_one_for_all_rows() -> None:
    layer = SynthesizerAttention(16, 2, variant="random", max_length=9).eval()
    states, mask = torch.randn(3, 9, 16), torch.rand(2, 9, 9) > 0.4
    for need_weights in (False, True):
        actual = layer(states, mask, need_weights=need_weights)[0]
        torch.testing.assert_close(actual, layer(states, mask[None], need_weights=need_weights)[0])


def test_a_mask_of_whole_numbers_is_refused() -> None:
    layer = SynthesizerAttention(16, 2, variant="random", max_length=9)
    with pytest.raises(AttentionInputError, match="mask of int64 .* Call mask.bool"):
        layer(torch.randn(3, 9, 16), torch.ones(3, 1, 9, 9, dtype=torch.long))


def test_one_tensor_asked_about_as_two_masks_has_two_answers() -> None:
    mask = torch.tensor([[True], [True]])[:, None, None]  # (2, 1, 1, 1)
    narrow = AttentionMask.from_tensor(mask)
    assert narrow.extents().last == (1, 1)
    assert narrow.expanded_to((2, 4, 7, 7)).extents().last == (7, 7)


def kernel_inputs(
    logits: Logits, value: torch.Tensor, mask: AttentionMask | None = None
) -> tuple[operands.KernelInputs, list]:
    mask = AttentionMask() if mask is None else mask
    return operands.KernelInputs.of(Terms.of(logits, mask), value, mask, 0.0, False)


MISFITS = {
    "logits of fewer rows": lambda: Explicit(torch.randn(2, HEADS, LENGTH, LENGTH)),
    "logits of fewer keys": lambda: Static(torch.randn(HEADS, LENGTH, LENGTH - 1)),
    "a table of other heads": lambda: Static(torch.randn(HEADS - 1, LENGTH, LENGTH)),
    "tables of two lengths": lambda: Sum(
        [(None, Static(torch.randn(HEADS, LENGTH, LENGTH))), (None, Static(torch.randn(HEADS, LENGTH - 1, LENGTH)))]
    ),
    "weights of other heads": lambda: Sum([(torch.randn(HEADS + 1), Static(torch.randn(HEADS, LENGTH, LENGTH)))]),
    "queries of other heads": lambda: LowRank(torch.randn(BATCH, 2, LENGTH, 4), torch.randn(1, HEADS, LENGTH, 4)),
    "keys of another width": lambda: LowRank(torch.randn(BATCH, HEADS, LENGTH, 4), torch.randn(1, HEADS, LENGTH, 3)),
    "keys of another length": lambda: LowRank(torch.randn(BATCH, HEADS, LENGTH, 4), torch.randn(1, HEADS, 3, 4)),
    "an outer product that is too short": lambda: Tiled(
        torch.randn(BATCH, HEADS, LENGTH, 3), torch.randn(BATCH, HEADS, LENGTH, 3), LENGTH
    ),
    "factors of fewer rows": lambda: Tiled(torch.randn(2, HEADS, LENGTH, 8), torch.randn(2, HEADS, LENGTH, 5), LENGTH),
    "salience of other keys": lambda: KeyBias(torch.randn(BATCH, HEADS, 1, LENGTH - 1), LENGTH),
    "a table on another device": lambda: Static(torch.randn(HEADS, LENGTH, LENGTH, device="meta")),
    "memory that was given back": lambda: Tiled(
        emptied(torch.randn(BATCH, HEADS, LENGTH, 8)), torch.randn(BATCH, HEADS, LENGTH, 5), LENGTH
    ),
}


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """What sharded training leaves of a parameter between its uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("misfit", MISFITS)
def test_operands_that_do_not_fit_each_other_never_reach_a_kernel(misfit: str) -> None:
    value = torch.randn(BATCH, HEADS, LENGTH, 8)
    with pytest.raises(AttentionInputError, match="Attention was given"):
        inputs, tensors = kernel_inputs(MISFITS[misfit](), value)
        inputs.arguments(tensors)


def test_a_mask_that_was_not_fitted_never_reaches_a_kernel() -> None:
    inputs, tensors = kernel_inputs(FORMS["table"](), torch.randn(BATCH, HEADS, LENGTH, 8))
    for shape in ((2, 1, LENGTH, LENGTH), (BATCH, 1, LENGTH, 1), (BATCH, 1, 1, LENGTH - 1)):
        unfit = operands.KernelInputs(**{**vars(inputs), "keep": torch.ones(shape, dtype=torch.bool)})
        with pytest.raises(AttentionInputError, match="Attention was given a mask"):
            unfit.arguments(tensors)


@compiled
@pytest.mark.parametrize("name", ["query", "inner", "outer"])
def test_a_factor_of_one_row_has_a_gradient_of_one_row(name: str) -> None:
    """The kernels write a gradient for each row of the batch, whatever the factor has."""
    torch.manual_seed(0)
    value = torch.randn(BATCH, HEADS, LENGTH, 8)
    factors = {
        each: torch.randn(1 if each == name else BATCH, HEADS, LENGTH, width, requires_grad=True)
        for each, width in (("query", 4), ("inner", 8), ("outer", 5))
    }
    logits = Sum(
        [
            (None, LowRank(factors["query"], torch.randn(1, HEADS, LENGTH, 4))),
            (None, Tiled(factors["inner"], factors["outer"], LENGTH)),
        ]
    )
    terms = Terms.of(logits, AttentionMask())
    assert native.serves(terms, value, AttentionMask(), 0.0)
    actual = native.native_attention(terms, value, AttentionMask())
    expected = reference.reference_attention(logits, value, AttentionMask())[0]
    upstream = torch.randn_like(actual)
    grads = [torch.autograd.grad(made, [*factors.values()], upstream) for made in (actual, expected)]
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_training_under_another_default_dtype_gives_the_same_gradients(default: torch.dtype) -> None:
    """Transformers loads models under the checkpoint's dtype; memory that the kernels write must not follow it."""
    table, value = torch.randn(2, 70, 70, requires_grad=True), torch.randn(2, 2, 70, 8, requires_grad=True)
    query, key = (torch.randn(2, 2, 70, 4, requires_grad=True) for _ in range(2))
    weight = torch.rand(2, requires_grad=True)
    inputs = [table, value, query, key, weight]

    def run() -> list[torch.Tensor]:
        logits = Sum([(weight, Static(table)), (None, LowRank(query, key))])
        terms = Terms.of(logits, AttentionMask())
        output = native.native_attention(terms, value, AttentionMask())
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    expected = run()
    torch.set_default_dtype(default)
    try:
        actual = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@compiled
def test_attention_under_another_default_device_works() -> None:
    value, table = torch.randn(2, 2, 70, 8), torch.randn(2, 70, 70, requires_grad=True)
    mask = torch.arange(70) < torch.tensor([[70], [50]])
    mask = mask[:, None, None]

    def run() -> list[torch.Tensor]:
        actual = attend(Static(table), value, AttentionMask(mask))[0]
        return [actual, *torch.autograd.grad(actual.sum(), table)]

    expected = run()
    with torch.device("meta"):
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@compiled
def test_saved_tensors_may_come_back_in_another_layout() -> None:
    """A hook on saved tensors (offloading, compression) gives back equal numbers, not equal strides."""
    table, value = torch.randn(2, 70, 70, requires_grad=True), torch.randn(2, 2, 70, 8, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        output = native.native_attention(Terms.of(Static(table), AttentionMask()), value, AttentionMask())
        return torch.autograd.grad(output.square().sum(), (table, value))

    expected = run()

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format) if tensor.dim() > 1 else tensor

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t.transpose(-1, -2) if t.dim() > 1 else t):
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@compiled
def test_a_factor_that_is_negated_when_it_is_read_is_read_so() -> None:
    query = torch.randn(2, 2, 70, 4, dtype=torch.complex64).conj().imag
    assert query.is_neg()
    key, value = torch.randn(2, 2, 70, 4), torch.randn(2, 2, 70, 8)
    terms = Terms.of(LowRank(query, key), AttentionMask())
    actual = native.native_attention(terms, value, AttentionMask())
    torch.testing.assert_close(actual, reference.reference_attention(LowRank(query, key), value, AttentionMask())[0])


@compiled
def test_logits_of_no_number_are_zeros() -> None:
    """A product over no columns is 0; the kernels would leave what was in memory."""
    empty, value = torch.zeros(2, 2, 70, 0), torch.randn(2, 2, 70, 8)
    actual = attend(LowRank(empty, empty), value)[0]
    torch.testing.assert_close(actual, value.mean(-2, keepdim=True).expand_as(actual))
