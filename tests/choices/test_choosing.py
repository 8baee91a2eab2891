"""The variants whose queries choose their keys: what is chosen, what never is, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_synthesizer import (
    SynthesizerAttention,
    count_flops,
    patch_model,
    patch_report,
    transfer_attention,
    unpatch_model,
)
from hf_synthesizer.attend import attend, reference
from hf_synthesizer.attend.sparse import buckets
from hf_synthesizer.logits.masks import AttentionMask
from tests.helpers.models import CHOOSING, RELATIVES, batch, build, first_output, mask
from tests.helpers.teaching import loader, sharp, student_of
from tests.layers import test_registered_model_types as test_model_types
from tests.synthesizers import test_laws
from tests.synthesizers.test_formulas import naive_rows

N, WIDTH = 36, 12
PATTERNS = ("sparse_strided", "sparse_fixed")
HASHES = ("lsh_simple", "alsh_simple", "alsh_xbox", "alsh_sign")
SMALL = {"bucket_size": 4, "num_hashes": 2}


def layer_of(variant: str, heads: int = 3, max_length: int = N, **options: Any) -> SynthesizerAttention:
    options = {**(SMALL if variant in HASHES else {}), **options}
    return SynthesizerAttention(WIDTH, heads, variant, max_length, **options).double().eval()


@pytest.fixture(params=[0, buckets.SHORT_LENGTH], ids=["sorted", "all pairs"])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Up to how many tokens hashing looks at all pairs."""
    monkeypatch.setattr(buckets, "SHORT_LENGTH", request.param)
    return request.param


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.double)


def chosen_by(layer: SynthesizerAttention, hidden_states: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return layer(hidden_states, keep)[1] > 0


# ---- what is chosen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "right", "left", "full", "holes"])
@pytest.mark.parametrize("length", [1, 2, 3, 9, 36])
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        *((variant, {}) for variant in CHOOSING),
        ("sparse_strided", {"stride": 4}),
        ("sparse_fixed", {"stride": 5}),
        ("alsh_xbox", {"qnf": True}),
        ("alsh_sign", {"qnf": True}),
        ("lsh_simple", {"num_hashes": 1}),
    ],
    ids=str,
)
def test_keys_and_outputs_are_those_of_the_loops(
    variant: str, options: dict, length: int, padding: str, short: int
) -> None:
    """With an odd number of heads, the fast route as well as the one that returns weights."""
    layer, hidden_states = layer_of(variant, **options), tokens(3, length)
    keep = torch.rand(3, length) > 0.3 if padding == "holes" else mask(3, length, padding)
    value = layer.value(hidden_states).view(3, length, 3, -1).transpose(1, 2).detach()
    expected_weights, expected = naive_rows(layer.synthesizer, value, hidden_states, keep)
    with torch.no_grad():
        output, weights = layer(hidden_states, keep)
        fast, _ = layer(hidden_states, keep, need_weights=False)
        expected = layer.output(expected)
    assert torch.equal(weights > 0, expected_weights > 0)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(fast, expected)


@pytest.mark.parametrize("options", [{}, {"stride": 3}], ids=str)
@pytest.mark.parametrize("variant", PATTERNS)
def test_causal_patterns_look_back_alone(variant: str, options: dict) -> None:
    """Their l is √N, whatever the length: a decoder does not know how long its sequence will be."""
    layer, hidden_states, keep = layer_of(variant, **options), tokens(3, 20), mask(3, 20, "left")
    value = layer.value(hidden_states).view(3, 20, 3, -1).transpose(1, 2).detach()
    expected_weights, expected = naive_rows(layer.synthesizer, value, hidden_states, keep, causal=True)
    with torch.no_grad():
        _, weights = layer(hidden_states, keep, is_causal=True)
        fast, _ = layer(hidden_states, keep, is_causal=True, need_weights=False)
        expected = layer.output(expected)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(fast, expected)
    assert weights.triu(1).max() == 0


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_the_first_half_of_the_heads_rounded_up_has_the_first_pattern(heads: int) -> None:
    i, j = torch.arange(25)[:, None], torch.arange(25)
    near, far = (i - j).abs() <= 5, (i - j) % 5 == 0
    for head, pairs in enumerate(chosen_by(layer_of("sparse_strided", heads), tokens(1, 25), None)[0]):
        assert torch.equal(pairs, near if head < (heads + 1) // 2 else far)


@pytest.mark.parametrize("variant", HASHES)
def test_as_many_keys_as_the_bucket_has_places(variant: str) -> None:
    layer = layer_of(variant, num_hashes=6)
    counts = chosen_by(layer, tokens(2, N), None).sum(-1)
    assert (counts == 4).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", HASHES)
def test_short_sequences_have_full_attention(variant: str, bias: bool) -> None:
    """L ≤ bucket_size: every key is among the best, under padding as well."""
    layer, hidden_states = layer_of(variant, bucket_size=32), tokens(3, 30)
    logits, keep = layer.synthesizer(hidden_states), mask(3, 30, "right").bool()
    value, added = torch.randn(3, 3, 30, 4).double(), torch.randn(1, 3, 30, 30).double() if bias else None
    output, _ = attend(logits, value, AttentionMask(keep[:, None, None], added))
    shared = layer.synthesizer.project_keys(hidden_states)
    scores = shared @ shared.mT * (WIDTH // 3) ** -0.5 + (0 if added is None else added)
    expected = scores.masked_fill(~keep[:, None, None], -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(output, expected * keep[:, None, :, None])


def test_one_cluster_is_full_attention() -> None:
    layer, hidden_states = layer_of("routing"), tokens(2, 3)
    assert chosen_by(layer, hidden_states, None).all()


def test_query_normalisation_changes_what_is_found() -> None:
    hidden_states = tokens(2, N)
    for variant in ("alsh_xbox", "alsh_sign"):
        actual = []
        for qnf in (False, True):
            torch.manual_seed(0)
            actual.append(chosen_by(layer_of(variant, num_hashes=1, qnf=qnf), hidden_states, None))
        assert not torch.equal(*actual)


# ---- what never is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("variant", CHOOSING)
def test_padding_is_never_chosen_and_changes_nothing(variant: str, padding: str) -> None:
    """A row in a padded batch is what it is alone, wherever the padding stands and whatever it holds."""
    layer, hidden_states, keep = layer_of(variant), tokens(3, N), mask(3, N, padding).bool()
    keep[2] = torch.arange(N) < 17 if padding == "right" else torch.arange(N) >= 19
    hidden_states = torch.where(keep[..., None], hidden_states, 100.0)  # no key is longer
    output, weights = layer(hidden_states, keep)
    fast, _ = layer(hidden_states, keep, need_weights=False)
    assert not weights.transpose(-1, -2)[~keep[:, None].expand(3, 3, -1)].any()
    for row in range(3):
        own_output, own_weights = layer(hidden_states[row : row + 1, keep[row]])
        assert torch.equal(own_weights[0] > 0, (weights[row] > 0)[:, keep[row]][..., keep[row]])
        torch.testing.assert_close(output[row, keep[row]], own_output[0])
        torch.testing.assert_close(fast[row, keep[row]], own_output[0])


@pytest.mark.parametrize("variant", CHOOSING)
def test_rows_of_a_batch_do_not_influence_each_other(variant: str) -> None:
    layer, hidden_states = layer_of(variant), tokens(2, N)
    before = layer(hidden_states, need_weights=False)[0]
    hidden_states[1] *= 50
    after = layer(hidden_states, need_weights=False)[0]
    torch.testing.assert_close(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("variant", CHOOSING)
def test_same_seed_same_choice(variant: str) -> None:
    layers = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        layers.append(layer_of(variant))
    hidden_states = tokens(2, N)
    first, second, other = (layer(hidden_states)[1] for layer in layers)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("variant", CHOOSING)
def test_eval_is_deterministic(variant: str) -> None:
    layer, hidden_states = layer_of(variant), tokens(2, N)
    first = layer(hidden_states, need_weights=False)[0]
    torch.manual_seed(99)
    assert torch.equal(layer(hidden_states, need_weights=False)[0], first)


# ---- what it saves, and the backward ------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Watches how large the largest tensor gets."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):  # an expanded one is no larger than what it was expanded from
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("variant", CHOOSING)
def test_no_tensor_of_all_pairs_is_ever_made(variant: str, padding: str) -> None:
    length = 1024
    layer = SynthesizerAttention(32, 2, variant, length).train()
    hidden_states = torch.randn(1, length, 32, requires_grad=True)
    keep = torch.arange(length)[None] < (length if padding == "none" else length - 9)
    with LargestTensor() as watch:
        layer(hidden_states, keep, need_weights=False)[0].sum().backward()
    assert 0 < watch.numel < length**2 / 2


@pytest.mark.parametrize("variant", CHOOSING)
def test_the_work_grows_with_the_chosen_keys(variant: str) -> None:
    flops = {}
    for length in (512, 2048):
        layer = SynthesizerAttention(32, 2, variant, length)
        x = torch.randn(1, length, 32)
        flops[length] = count_flops(layer, x, need_weights=False) - count_flops(layer.value, x) * 3
    full = SynthesizerAttention(32, 2, "dot_product", 2048)
    x = torch.randn(1, 2048, 32)
    assert flops[2048] < 10 * flops[512]  # 16 would be quadratic
    assert flops[2048] < 0.6 * (count_flops(full, x, need_weights=False) - count_flops(full.value, x) * 4)


@pytest.mark.parametrize("bias", [None, "position", "key", "row"])
@pytest.mark.parametrize("padding", ["none", "right", "holes"])
@pytest.mark.parametrize("variant", CHOOSING)
def test_gradients_are_those_of_the_reference(variant: str, padding: str, bias: str | None, short: int) -> None:
    synthesizer, hidden_states = layer_of(variant).synthesizer, tokens(3, N).requires_grad_()
    value = torch.randn(3, 3, N, 5, dtype=torch.double, requires_grad=True)
    shapes = {"position": (1, 3, N, N), "key": (3, 1, 1, N), "row": (3, 1, N, N)}
    added = None if bias is None else torch.randn(shapes[bias], dtype=torch.double, requires_grad=True)
    keep = torch.rand(3, N) > 0.3 if padding == "holes" else mask(3, N, padding).bool()
    under = AttentionMask(None if padding == "none" else keep[:, None, None], added)
    inputs = [hidden_states, value, *synthesizer.parameters(), *([] if added is None else [added])]
    upstream = torch.randn(3, 3, N, 5, dtype=torch.double)
    actual = torch.autograd.grad(attend(synthesizer(hidden_states), value, under)[0], inputs, upstream)
    expected = torch.autograd.grad(
        reference.reference_attention(synthesizer(hidden_states), value, under)[0], inputs, upstream
    )
    for grad, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("variant", CHOOSING)
def test_dropout_drops_and_scales(variant: str) -> None:
    layer = layer_of(variant)
    logits, eye = layer.synthesizer(tokens(1, N)), torch.eye(N).double().expand(1, 3, -1, -1)
    expected, weights = attend(logits, eye)[0], attend(logits, eye, dropout=0.3)[0]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], (expected / 0.7)[kept])
    assert abs(kept.sum() / (expected != 0).sum() - 0.7) < 0.1


# ---- inside models ------------------------------------------------------------------------------------------------

ENCODERS = ("BertForSequenceClassification", "T5EncoderModel")


@pytest.mark.parametrize("head", ENCODERS)
@pytest.mark.parametrize("variant", RELATIVES)
def test_what_holds_for_all_variants(variant: str, head: str) -> None:
    for padding in ("none", "left", "full"):
        test_model_types.test_backends_agree(variant, head, padding)
    test_model_types.test_inputs_embeds(variant, head)
    test_model_types.test_gradient_checkpointing(variant, head, False)
    test_model_types.test_autocast_trains(variant, head)
    test_model_types.test_bfloat16(variant, head, "sdpa")


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("variant", RELATIVES)
def test_a_padded_token_changes_no_other_position(variant: str, padding: str) -> None:
    for head in ("BertModel", "T5EncoderModel"):
        test_laws.test_a_padded_token_changes_no_other_position(variant, head, padding)


@pytest.mark.feature("torch.compile in one graph")
@pytest.mark.parametrize("variant", ["sparse_fixed", "alsh_sign", "routing"])
def test_one_graph(variant: str) -> None:
    test_model_types.test_compiles_as_one_graph(variant, "BertModel", "right")


@pytest.mark.feature("transfer_attention")
@pytest.mark.parametrize("variant", ["alsh_sign", "routing"])
def test_a_transfer_teaches_the_shared_projection(variant: str) -> None:
    head = "BertForSequenceClassification"
    teacher, batches = sharp(head), loader(head)
    model = student_of(teacher, variant)
    projection = model.bert.encoder.layer[0].attention.self.synthesizer.projection.weight
    before = projection.clone()
    report = transfer_attention(model, teacher, batches, steps=(15, 0), learning_rate=1e-2, progress=False)
    assert not torch.equal(projection, before)
    assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)
    report = transfer_attention(model, teacher, batches, steps=(0, 15), learning_rate=1e-2, progress=False)
    assert report.error_after < report.error_before


@pytest.mark.parametrize("variant", CHOOSING)
def test_the_shared_projection_starts_as_the_mean_of_the_base_models_two(variant: str) -> None:
    stock = build("BertModel")
    query, key = (stock.encoder.layer[0].attention.self.get_submodule(name) for name in ("query", "key"))
    before = query.weight.clone(), key.weight.clone()
    layer = patch_model(stock, variant).encoder.layer[0].attention.self
    torch.testing.assert_close(layer.synthesizer.projection.weight, (before[0] + before[1]) / 2)
    torch.testing.assert_close(layer.synthesizer.projection.bias, (query.bias + key.bias) / 2)
    assert torch.equal(query.weight, before[0]) and layer.synthesizer.scaling == 8**-0.5
    assert patch_report(stock).swapped[0].after == query.weight.numel() + query.bias.numel()


def test_hybrids_with_synthesizers() -> None:
    model, inputs = build("BertForSequenceClassification", num_hidden_layers=4), batch("BertForSequenceClassification")
    stock = first_output(model(**inputs))
    patch_model(model, {0: "random", 1: "lsh_simple", 2: "sparse_fixed", 3: "routing"}, bucket_size=4)
    loss = model(**inputs, labels=torch.tensor([0, 1, 0])).loss
    loss.backward()
    assert all(layer.attention.self.synthesizer is not None for layer in model.bert.encoder.layer)
    assert model.bert.encoder.layer[1].attention.self.synthesizer.config.bucket_size == 4
    assert torch.equal(first_output(unpatch_model(model)(**inputs)), stock)


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("variant", ["sparse_strided", "sparse_fixed"])
def test_a_stride_longer_than_the_row_costs_no_more_than_the_row(variant: str, causal: bool, length: int) -> None:
    layers = [SynthesizerAttention(8, 2, variant, max_length=16, stride=stride).eval() for stride in (2**31 - 1, 17)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers.append(SynthesizerAttention(8, 2, variant, max_length=2**20, stride=2**19).eval())
    layers[2].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, length, 8)
    with torch.no_grad():
        expected, _ = layers[1](x, is_causal=causal)  # every pair, masked
        for layer in layers:
            torch.testing.assert_close(layer(x, is_causal=causal, need_weights=False)[0], expected)


@pytest.mark.parametrize("padding", ["none", "right", "holes"])
@pytest.mark.parametrize("num_hashes", [1, 3])
def test_of_keys_that_are_equal_no_more_are_chosen_than_a_bucket_holds(num_hashes: int, padding: str) -> None:
    layer = layer_of("lsh_simple", num_hashes=num_hashes)
    hidden_states = tokens(1, 3).expand(2, -1, -1).repeat(1, 6, 1)  # the same three tokens again and again
    keep = torch.ones(2, 18, dtype=torch.bool)
    if padding != "none":
        keep[1, 15:] = False
    if padding == "holes":
        keep[1, 4:6] = False
    for need_weights in (False, True):
        output, weights = layer(hidden_states, keep, need_weights=need_weights)
        assert output.isfinite().all()
        if weights is not None:
            count = (weights[keep[:, None].expand(-1, weights.shape[1], -1)] > 0).sum(-1)
            assert count.min() >= 1 and count.max() <= 4
            assert not weights.transpose(-1, -2)[~keep[:, None].expand(-1, weights.shape[1], -1)].any()


# ---- what is refused ----------------------------------------------------------------------------------------------
