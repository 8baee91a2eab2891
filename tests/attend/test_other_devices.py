"""The routes of devices that are no processor, taken on a processor: exact, small, and placed where they belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.attend import as_accelerator, attend, choose_route, chunk_inputs, chunked, reference
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import LowRank, Static
from hf_synthesizer.logits.masks import AttentionMask
from hf_synthesizer.logits.positions import Positions
from hf_synthesizer.synthesizers import build_synthesizer
from tests.helpers.models import MAX_LENGTH, RELATIVES, VARIANTS, batch, build, first_output, randomize
from tests.helpers.models import mask as key_mask
from tests.helpers.problems import TOLERANCE, Posed, leaves, make_form, make_logits, make_mask, problems


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    problems(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        numbers=[8, 60, 1 << 20],
        rows=[2, 3, 128],
    )
)
def test_the_routes_of_other_devices_equal_the_reference(problem) -> None:
    posed = Posed.of(problem)
    with pytest.MonkeyPatch.context() as patch, as_accelerator():
        patch.setattr(chunk_inputs, "MOST_LOGITS", problem["numbers"])
        patch.setattr(chunk_inputs, "QUERIES", problem["rows"])
        patch.setattr(chunk_inputs, "SHORT_LENGTH", 4)
        patch.setattr(chunk_inputs, "FEWEST_QUERIES", 2)
        for route in ("chunked", "static"):
            posed.check(route)


@pytest.mark.parametrize("names", [["static", "salience"], ["low_rank", "static_product"], ["biased", "tiled"]])
def test_chunks_have_first_and_second_derivatives(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_inputs, "MOST_LOGITS", 8)
    monkeypatch.setattr(chunk_inputs, "FEWEST_QUERIES", 2)
    shape = (2, 2, 3, 4)
    logits, mask = make_logits(names, True, *shape, dtype=torch.float64), make_mask("right", *shape, torch.float64)
    value = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    inputs = tuple(leaves(logits, mask, value))

    def run(*_: torch.Tensor) -> torch.Tensor:
        with as_accelerator():
            return chunked.chunked_attention(Terms.of(logits, mask), value, mask)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("order", [1, 2])
def test_a_chunk_drops_the_same_weights_forward_and_backward(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is linear in the values, so its gradient shows the very weights that the forward used."""
    monkeypatch.setattr(chunk_inputs, "MOST_LOGITS", 60)
    monkeypatch.setattr(chunk_inputs, "FEWEST_QUERIES", 2)
    logits = LowRank(torch.randn(2, 3, 6, 4), torch.randn(1, 3, 7, 4))
    value = torch.randn(2, 3, 7, 5, requires_grad=True)
    with as_accelerator():
        output = chunked.chunked_attention(Terms.of(logits, AttentionMask()), value, AttentionMask(), 0.5)
        upstream = torch.randn_like(output)
        torch.rand(3)  # somebody draws in between
        (grad,) = torch.autograd.grad(output, value, upstream, create_graph=order == 2)
    torch.testing.assert_close((grad * value).sum(), (output * upstream).sum())


def test_chunks_drop_and_scale_and_follow_the_seed() -> None:
    heads, length, p = 2, 64, 0.3
    logits, eye = Static(torch.randn(heads, length, length)), torch.eye(length).expand(1, heads, -1, -1)
    expected = logits.materialize().softmax(-1)
    with as_accelerator():
        torch.manual_seed(0)
        weights = attend(logits, eye, dropout=p)[0]  # the values are an identity: the output is the weights
        other = attend(logits, eye, dropout=p)[0]
        torch.manual_seed(0)
        assert torch.equal(attend(logits, eye, dropout=p)[0], weights)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], (expected / (1 - p))[kept])
    assert abs(1 - kept.float().mean() - p) < 0.03
    assert not torch.equal(other, weights)


@pytest.mark.parametrize("names", [["low_rank"], ["static_product", "low_rank"], ["static"], ["tiled"]])
def test_autocast_casts_on_the_routes_of_other_devices_as_on_the_reference(names: list[str]) -> None:
    shape = (2, 2, 6, 6)
    logits, mask = make_logits(names, False, *shape, dtype=torch.float32), make_mask("right", *shape, torch.float32)
    value = torch.randn(2, 2, 6, 4, requires_grad=True)
    inputs = leaves(logits, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference.reference_attention(logits, value, mask)[0]
        with as_accelerator():
            actual = chunked.chunked_attention(Terms.of(logits, mask), value, mask)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(actual)
    for grad, known in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (actual, expected)), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, known, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("form", "mask", "dropout", "dtype", "route"),
    [
        ("static", "none", 0.0, torch.float32, "static"),
        ("static", "none", 0.0, torch.float16, "static"),
        ("static", "causal", 0.0, torch.bfloat16, "static"),
        ("static", "right", 0.0, torch.float32, "chunked"),
        ("static", "none", 0.1, torch.float32, "chunked"),
        ("low_rank", "none", 0.0, torch.float32, "sdpa"),
        ("low_rank", "right", 0.0, torch.float16, "sdpa"),
        ("low_rank", "none", 0.1, torch.float32, "chunked"),  # a processor's kernel drops nothing; a GPU's does
        ("low_rank", "causal-left", 0.0, torch.float32, "chunked"),
        ("biased", "none", 0.0, torch.float32, "chunked"),
        ("tiled", "none", 0.0, torch.float32, "chunked"),
        ("salience", "right", 0.0, torch.float32, "chunked"),
    ],
)
def test_the_rules_by_which_other_devices_choose(
    form: str, mask: str, dropout: float, dtype: torch.dtype, route: str
) -> None:
    shape = (2, 2, 8, 8)
    logits, attention_mask = make_form(form, *shape, dtype), make_mask(mask, *shape, dtype)
    with as_accelerator():
        assert (
            choose_route(
                Terms.of(logits, attention_mask), torch.randn(2, 2, 8, 4, dtype=dtype), attention_mask, dropout
            )
            == route
        )


def test_a_table_that_rests_becomes_known_with_the_next_mask() -> None:
    """Then one product a head serves the whole ragged batch; the question is asked along with that about the mask."""
    table = torch.randn(2, 6, 6, requires_grad=True)
    value = torch.randn(3, 2, 6, 4)

    def route(table: torch.Tensor) -> str:
        mask = make_mask("right", 3, 2, 6, 6, torch.float32)
        return choose_route(Terms.of(Static(table[:, :, :6]), mask), value, mask, 0.0)

    with as_accelerator():
        assert route(table) == "chunked"  # in training it is another one each step
        with torch.no_grad():
            assert [route(table) for _ in range(3)] == ["chunked", "static", "static"]
            table.mul_(100)
            assert [route(table) for _ in range(3)] == ["chunked", "chunked", "chunked"]


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", [*VARIANTS, *RELATIVES])
def test_every_variant_equals_the_reference(
    variant: str, dtype: torch.dtype, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_inputs, "QUERIES", 5)
    monkeypatch.setattr(chunk_inputs, "SHORT_LENGTH", 0)
    torch.manual_seed(0)
    layer = randomize(build_synthesizer(SynthesizerConfig(variant), 24, 3, MAX_LENGTH), std=0.2).to(dtype)
    hidden = torch.randn(3, 20, 24).to(dtype)
    value = torch.randn(3, 3, 20, 8).to(dtype).requires_grad_()
    keep = None if padding == "none" else key_mask(3, 20, padding).bool()[:, None, None, :]
    inputs = [value, *(p for p in layer.parameters() if p.requires_grad)]
    expected = reference.reference_attention(layer(hidden), value, AttentionMask(keep))[0]
    with as_accelerator():
        actual = attend(layer(hidden), value, AttentionMask(keep))[0]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected)
    grads, wanted = (torch.autograd.grad(x, inputs, upstream, allow_unused=True) for x in (actual, expected))
    # A key's bias moves no weight: its gradient is the rounding of the others.
    size = max(1.0, *(float(known.abs().max()) for known in wanted if known is not None))
    for grad, known in zip(grads, wanted, strict=True):
        if known is not None:
            torch.testing.assert_close(grad, known, rtol=tolerance, atol=tolerance * size)


class Allocations(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and the devices of all."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.devices: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                # What is only seen larger, an expanded view, takes no memory.
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.devices.add(tensor.device.type)
        return result


def train_a_layer(variant: str, shape: tuple[int, int, int], device: str, padded: bool, causal: bool) -> Allocations:
    """One forward and backward of a layer under attention dropout; (B, H, L) in `shape`."""
    rows, heads, length = shape
    config = SynthesizerConfig(variant, **({"max_distance": 32} if "relative" in variant else {}))
    with torch.device(device):
        layer = build_synthesizer(config, 8 * heads, heads, length).train()
        hidden = torch.randn(rows, length, 8 * heads, requires_grad=True)
        value = torch.randn(rows, heads, length, 8, requires_grad=True)
        keep = torch.ones(rows, 1, 1, length, dtype=torch.bool) if padded else None
    with Allocations() as allocations:
        mask = AttentionMask(keep, None, 0 if causal else None)
        for dropout in (0.1, 0.0):
            output = attend(layer(hidden), value, mask, dropout=dropout)[0]
            output.float().square().sum().backward()
    return allocations


COUNTED = tuple(name for name in (*VARIANTS, "sparse_fixed") if name != "routing" and "lsh" not in name)


MASKED = [
    (variant, mask)
    for variant in COUNTED
    for mask in ("none", "padded", "causal", "both")
    if not (variant.startswith("sparse") and mask in ("padded", "both"))  # without numbers no row has an end
]


@pytest.mark.parametrize(("variant", "mask"), MASKED)
def test_nothing_as_large_as_all_logits_is_made_nor_anything_elsewhere(variant: str, mask: str) -> None:
    """Tensors of the meta device have sizes without numbers. A table's gradient is (H, L, L) on every route."""
    rows, heads, length = shape = (12, 2, 2048)
    allocations = train_a_layer(variant, shape, "meta", mask in ("padded", "both"), mask in ("causal", "both"))
    assert allocations.largest < rows * heads * length**2 / 10
    assert allocations.devices == {"meta"}


@pytest.mark.parametrize("variant", ["random", "dense", "factorized_dense", "random+dot_product", "sparse_strided"])
def test_a_processor_on_the_routes_of_other_devices_makes_nothing_larger(variant: str) -> None:
    """Fake tensors choose between the same kernels as true ones."""
    rows, heads, length = shape = (12, 2, 2048)
    with as_accelerator(), FakeTensorMode():
        allocations = train_a_layer(variant, shape, "cpu", False, False)
    assert allocations.largest < rows * heads * length**2 / 10


@pytest.mark.parametrize("variant", ["random", "factorized_dense", "dense", "random+salience", "random+dot_product"])
def test_a_row_with_positions_of_its_own_makes_nothing_larger(variant: str) -> None:
    """As left padding gives them."""
    rows, heads, length = 12, 2, 2048
    with torch.device("meta"):
        layer = build_synthesizer(SynthesizerConfig(variant), 8 * heads, heads, length).train()
        hidden = torch.randn(rows, length, 8 * heads, requires_grad=True)
        value = torch.randn(rows, heads, length, 8, requires_grad=True)
        places = torch.empty(rows, length, dtype=torch.long)
    positions = Positions(length, length, 0, places, places)
    with Allocations() as allocations:
        for dropout in (0.1, 0.0):
            logits = layer.synthesize(hidden, layer.project_keys(hidden), positions)
            output = attend(logits, value, AttentionMask(), dropout=dropout)[0]
            output.float().square().sum().backward()
    assert allocations.largest < rows * heads * length**2 / 10


CHOOSING_BY_NUMBERS = [
    ("sparse_strided", "left", 0),
    ("sparse_fixed", "right", 0),
    ("sparse_strided", "right", None),
    ("lsh_simple", "none", None),
    ("lsh_simple", "right", None),
    ("routing", "none", None),
    ("routing", "right", None),
]


@pytest.mark.parametrize(("variant", "padding", "causal"), CHOOSING_BY_NUMBERS)
def test_choosing_keys_makes_nothing_as_large_either(variant: str, padding: str, causal: int | None) -> None:
    """Which keys are chosen depends on numbers, and how large tensors are on that: so with numbers."""
    rows, heads, length = 12, 2, 2048
    layer = build_synthesizer(SynthesizerConfig(variant), 8 * heads, heads, length).train()
    hidden = torch.randn(rows, length, 8 * heads, requires_grad=True)
    value = torch.randn(rows, heads, length, 8, requires_grad=True)
    keep = None if padding == "none" else key_mask(rows, length, padding).bool()[:, None, None, :]
    with as_accelerator(), Allocations() as allocations:
        output = attend(layer(hidden), value, AttentionMask(keep, None, causal), dropout=0.1)[0]
        output.square().sum().backward()
    assert allocations.largest < rows * heads * length**2 / 10


@pytest.mark.parametrize("variant", COUNTED)
@pytest.mark.parametrize("head", ["BertModel", "BertLMHeadModel", "T5EncoderModel", "T5ForConditionalGeneration"])
def test_a_model_makes_no_tensor_on_another_device_than_its_own(head: str, variant: str) -> None:
    with torch.device("meta"):
        model = patch_model(build(head), variant).train()
    inputs = {name: tensor.to("meta") for name, tensor in batch(head).items() if not name.endswith("mask")}
    with Allocations() as allocations:
        first_output(model(**inputs)).sum().backward()
    assert allocations.devices == {"meta"}
