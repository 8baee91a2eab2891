"""fuse_for_inference changes nothing but the time, is undone by unfuse, and says no where it should."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_synthesizer import (
    FusedModelError,
    InvalidConfigError,
    SynthesizerAttention,
    count_parameters,
    fuse_for_inference,
    patch_model,
    patch_report,
    unfuse,
)
from hf_synthesizer.inference.fused import FusedSynthesizer
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import batch, build, decoder, first_output, mask
from tests.layers.test_decoding import generate
from tests.synthesizers.test_laws import randomize_synthesizers

FUSABLE = ("random", "fixed_random", "factorized_random", "random+salience", "random+factorized_random")
MIXED = ("random+dense", "factorized_random+dot_product", "random+dense+salience")
HEADS = ("BertForSequenceClassification", "BertLMHeadModel", "T5ForConditionalGeneration")


def fused_model(head: str, variant: str):
    model = patch_model(build(head), variant)
    randomize_synthesizers(model)
    return model


@pytest.mark.feature("fuse_for_inference")
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "right", "left", "full"])
@pytest.mark.parametrize("variant", [*FUSABLE, *MIXED])
@pytest.mark.parametrize("head", HEADS)
def test_a_fused_model_computes_the_same(head: str, variant: str, padding: str, backend: str) -> None:
    model, inputs = fused_model(head, variant), batch(head, padding=padding)
    model.set_attn_implementation(backend)
    names = list(model.state_dict())
    with torch.no_grad():
        before = first_output(model(**inputs))
        fuse_for_inference(model)
        torch.testing.assert_close(first_output(model(**inputs)), before, rtol=1e-4, atol=1e-4)
        assert list(model.state_dict()) == names
        assert torch.equal(first_output(unfuse(model)(**inputs)), before)


@pytest.mark.parametrize("variant", ["random", "random+salience", "random+dot_product", "factorized_random"])
@pytest.mark.parametrize("head", LAYER_CLASSES)
def test_a_fused_model_of_each_layer_class_computes_the_same(head: str, variant: str) -> None:
    model, inputs = fused_model(head, variant), batch(head)
    with torch.no_grad():
        before = first_output(model(**inputs))
        fuse_for_inference(model)
        torch.testing.assert_close(first_output(model(**inputs)), before, rtol=1e-4, atol=1e-4)
        assert torch.equal(first_output(unfuse(model)(**inputs)), before)


@pytest.mark.parametrize("variant", FUSABLE)
@pytest.mark.parametrize("head", HEADS[:2])
def test_a_fused_model_keeps_its_window(head: str, variant: str) -> None:
    model, inputs = patch_model(build(head), variant, window=4, sinks=1), batch(head)
    randomize_synthesizers(model)
    with torch.no_grad():
        before = first_output(model(**inputs))
        report = fuse_for_inference(model, tolerance=0.1)
        assert {layer.rank for layer in report.layers} == {None} and "window" in str(report)
        torch.testing.assert_close(first_output(model(**inputs)), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 24])
def test_any_length(length: int) -> None:
    model = fused_model("BertModel", "random+salience")
    ids, keep = torch.randint(2, 64, (3, length)), mask(3, length, "right")
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=keep).last_hidden_state
        fuse_for_inference(model)
        after = model(input_ids=ids, attention_mask=keep).last_hidden_state
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [*FUSABLE, *MIXED])
@pytest.mark.parametrize("model_type", ["bert", "t5"])
def test_generation(model_type: str, variant: str) -> None:
    model = patch_model(decoder(model_type), variant)
    randomize_synthesizers(model)
    ids, keep = torch.randint(2, 64, (3, 5)), mask(3, 5, "left")
    before = generate(model, ids, attention_mask=keep, do_sample=False)
    fuse_for_inference(model)
    assert torch.equal(generate(model, ids, attention_mask=keep, do_sample=False), before)
    assert torch.equal(generate(model, ids[:1], do_sample=False), generate(unfuse(model), ids[:1], do_sample=False))


def test_a_fused_model_is_copied_moved_and_compiled() -> None:
    model, inputs = fused_model("BertModel", "random"), batch("BertModel", padding="none")
    del inputs["attention_mask"]
    fuse_for_inference(model)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert torch.equal(copy.deepcopy(model)(**inputs).last_hidden_state, expected)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
        half = model.to(torch.bfloat16)(**inputs).last_hidden_state
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("tolerance", [0.3, 0.01])
def test_compression_keeps_within_its_tolerance(tolerance: float) -> None:
    torch.manual_seed(0)
    layer = SynthesizerAttention(32, 4, variant="factorized_random", max_length=64, rank=2).eval()
    with torch.no_grad():
        for factor in (layer.synthesizer.query_factor, layer.synthesizer.key_factor):
            factor.normal_()
    whole = copy.deepcopy(layer)
    fuse_for_inference(whole)
    report = fuse_for_inference(layer, tolerance=tolerance)
    (row,) = report.layers
    assert row.rank is not None and row.rank <= 32 and row.error <= tolerance
    fused = layer.synthesizer
    assert isinstance(fused, FusedSynthesizer) and fused.fused_weights is None
    weights, thin = whole.synthesizer.fused_weights, fused.fused_left @ fused.fused_right
    assert float((weights - thin).abs().sum(-1).max()) == pytest.approx(row.error, abs=1e-5)
    value = torch.randn(4, 64, 8)
    assert ((weights - thin) @ value).abs().max() <= tolerance * value.abs().max() + 1e-6
    x = torch.randn(2, 64, 32)
    with torch.no_grad():
        assert layer(x, need_weights=False)[0].shape == (2, 64, 32)


def test_a_smaller_tolerance_needs_a_greater_rank_and_some_matrices_are_kept_whole() -> None:
    layer = SynthesizerAttention(32, 4, variant="factorized_random", max_length=64, rank=2).eval()
    ranks = []
    for tolerance in (0.5, 0.01, 1e-9):
        ranks.append(fuse_for_inference(layer, tolerance=tolerance).layers[0].rank)
        unfuse(layer)
    assert ranks[0] is not None and ranks[1] is not None and ranks[0] <= ranks[1] and ranks[2] is None


def test_the_report_names_layers_ranks_and_errors() -> None:
    model = patch_model(build("BertModel"), {0: "random", 1: "dense"})
    text = str(fuse_for_inference(model))
    assert "encoder.layer.0.attention.self" in text and "weights" in text
    assert "nothing: dense depends on the input" in text


def test_what_cannot_be_fused() -> None:
    model = patch_model(build("BertModel"), "random")
    with pytest.raises(FusedModelError, match="model.eval"):
        fuse_for_inference(model.train())
    fuse_for_inference(model.eval())
    with pytest.raises(FusedModelError, match="fused already"):
        fuse_for_inference(model)
    with pytest.raises(FusedModelError, match="cannot be trained"):
        model.train()(**batch("BertModel"))
    with pytest.raises(FusedModelError, match="Nothing to fuse: none of the 2"):
        fuse_for_inference(patch_model(build("BertModel"), "dense"))


# ---- logits that lie far apart ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", ["random+salience", "factorized_random"])
@pytest.mark.parametrize("spread", [18, 90, 105])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_logits_that_lie_far_apart(dtype: torch.dtype, spread: int, variant: str, backend: str, padding: str) -> None:
    """The keys that most of a row's weight goes to are hidden, and what is left has to be told apart."""
    model = patch_model(build("BertModel"), variant).to(dtype)
    model.set_attn_implementation(backend)
    for layer in model.encoder.layer:
        spread_logits(layer.attention.self.synthesizer, spread)
    length = 20
    given = {"input_ids": torch.randint(2, 64, (2, length)), "attention_mask": mask(2, length, padding)}
    with torch.no_grad():
        before = model(**given).last_hidden_state
        report = fuse_for_inference(model)
        after = model(**given).last_hidden_state
    close = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(after, before, rtol=close, atol=close)
    exact = dtype != torch.float16 and spread <= 60
    assert all((row.what == "weights") == exact for row in report.layers)
    assert exact or "static logits: " in str(report)


def spread_logits(synthesizer: torch.nn.Module, spread: int) -> None:
    """Logits from 0, at the front, to `spread`, at positions that sequences of length 20 do not have."""
    parts = getattr(synthesizer, "parts", None)
    own = synthesizer if parts is None else parts["random"]
    with torch.no_grad():
        if hasattr(own, "query_factor"):
            own.query_factor.zero_()[..., 0] = 1
            own.key_factor.zero_()[..., 0] = torch.linspace(0, spread, own.max_length)
        else:
            own.table.copy_(torch.linspace(0, spread, own.max_length).expand_as(own.table))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fused_model_that_is_moved_to_another_dtype_is_computed_again(dtype: torch.dtype) -> None:
    model = patch_model(build("BertModel"), "factorized_random")
    for layer in model.encoder.layer:
        spread_logits(layer.attention.self.synthesizer, 40)
    stock, given = copy.deepcopy(model).to(dtype), batch("BertModel", padding="right")
    fuse_for_inference(model)
    with torch.no_grad():
        expected, found = stock(**given).last_hidden_state, model.to(dtype)(**given).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
        back = unfuse(model.float())(**given).last_hidden_state
        assert torch.equal(back, stock.float()(**given).last_hidden_state)


def test_factors_of_weights_are_never_without_a_softmax() -> None:
    layer = SynthesizerAttention(32, 4, "factorized_random", max_length=64, rank=2).eval()
    with torch.no_grad():
        for factor in (layer.synthesizer.query_factor, layer.synthesizer.key_factor):
            factor.normal_(std=1.2)
        assert fuse_for_inference(layer, tolerance=0.5).layers[0].rank is not None
        for length in (1, 3, 64):
            assert layer(torch.randn(2, length, 32), need_weights=False)[0].isfinite().all()
            assert layer(torch.randn(2, length, 32))[0].isfinite().all()


# ---- parameters behind a fused layer ------------------------------------------------------------------------------

BAKED = ("random", "random+salience", "random+dense", "factorized_random+dot_product")


def copies_of(variant: str):
    """A fused model, one of the same making with other weights, and inputs."""
    model, other = fused_model("BertModel", variant), fused_model("BertModel", variant)
    for parameter in other.parameters():
        parameter.data.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
    fuse_for_inference(model)
    return model, other, batch("BertModel", padding="right")


def assert_same(model, other, given) -> None:
    with torch.no_grad():
        expected = other(**given).last_hidden_state
        torch.testing.assert_close(model(**given).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(unfuse(model)(**given).last_hidden_state, expected, rtol=1e-6, atol=1e-6)
    assert_same_tensors(model, other)


def assert_same_tensors(model, other) -> None:
    expected = other.state_dict()
    assert list(expected) == list(model.state_dict())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "deepcopy"])
@pytest.mark.parametrize("variant", BAKED)
def test_loading_into_a_fused_model_computes_again(variant: str, copied: bool, assign: bool) -> None:
    model, other, given = copies_of(variant)
    model = copy.deepcopy(model) if copied else model
    loaded = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert model.load_state_dict(loaded, assign=assign) == ([], [])
    for name, tensor in loaded.items():
        if any(part in name for part in ("table", "factor", "mixing")):
            tensor.add_(1)  # an assigned tensor is in other hands as well
    assert_same_tensors(model, other)
    assert_same(model, other, given)


def test_loading_into_a_fused_model_says_what_does_not_fit() -> None:
    model, _, given = copies_of("random+dense")
    expected = model(**given).last_hidden_state
    state = model.state_dict()
    name = next(name for name in state if name.endswith("random.table"))
    with pytest.raises(RuntimeError, match="size mismatch for parts.random.table"):
        model.load_state_dict({**state, name: torch.zeros(1, 2, 2)})
    with pytest.raises(RuntimeError, match="Unexpected key.*random.other"):
        model.load_state_dict({**state, name.replace("table", "other"): torch.zeros(1)})
    assert torch.equal(model(**given).last_hidden_state, expected)


@pytest.mark.parametrize("moved", [False, True], ids=["as it was", "after a move"])
def test_parameters_of_a_fused_layer_are_out_of_reach(moved: bool) -> None:
    model, _, given = copies_of("random")
    model = model.double().float() if moved else model
    fused = model.encoder.layer[1].attention.self.synthesizer
    expected = model(**given).last_hidden_state
    with pytest.raises(FusedModelError, match="out of reach.*unfuse"):
        fused.table.data.add_(1)
    with pytest.raises(FusedModelError, match="cannot be replaced.*unfuse"):
        fused.table = torch.nn.Parameter(torch.zeros(4, 24, 24))
    for tensor in model.state_dict().values():
        if tensor.dim() == 3:
            tensor.data.add_(1)
    assert not any("table" in name for name, _ in model.named_parameters())
    assert torch.equal(model(**given).last_hidden_state, expected)


@pytest.mark.parametrize("variant", ["random", "random+dense"])
def test_whoever_holds_a_parameter_from_before_cannot_change_a_fused_layer(variant: str) -> None:
    model = fused_model("BertModel", variant)
    given = batch("BertModel", padding="right")
    synthesizer = model.encoder.layer[0].attention.self.synthesizer
    table = (synthesizer if variant == "random" else synthesizer.parts["random"]).table
    alias, values = table.data, table.detach().clone()
    fuse_for_inference(model)
    expected, state = model(**given).last_hidden_state, model.state_dict()
    alias.add_(1)
    table.data.add_(1)
    assert torch.equal(model(**given).last_hidden_state, expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    unfuse(model)
    assert model.encoder.layer[0].attention.self.synthesizer is synthesizer
    assert torch.equal(table, values) and any(table is parameter for parameter in model.parameters())


def test_what_a_fused_layer_computes_from_its_input_is_trained_and_edited_as_before() -> None:
    model, other, given = copies_of("random+dense")
    for own, its in zip(model.encoder.layer, other.encoder.layer, strict=True):
        own.attention.self.synthesizer.parts["dense"].load_state_dict(
            its.attention.self.synthesizer.parts["dense"].state_dict()
        )
    unfused = unfuse(copy.deepcopy(model))
    with torch.no_grad():
        found, expected = model(**given).last_hidden_state, unfused(**given).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    model(**given).last_hidden_state.sum().backward()
    assert model.encoder.layer[0].attention.self.synthesizer.parts["dense"].hidden.weight.grad is not None


def test_training_goes_on_after_an_evaluation_with_a_fused_model() -> None:
    model, given = fused_model("BertModel", "random"), batch("BertModel", padding="right")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train()(**given).last_hidden_state.square().sum().backward()
        before = model.encoder.layer[0].attention.self.synthesizer.table.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.encoder.layer[0].attention.self.synthesizer.table, before)
        fuse_for_inference(model.eval())
        model(**given)
        unfuse(model)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_a_tolerance_that_is_none(tolerance) -> None:
    with pytest.raises(InvalidConfigError, match="tolerance must be a number of at least 0"):
        fuse_for_inference(patch_model(build("BertModel"), "random"), tolerance=tolerance)


@pytest.mark.parametrize("variant", BAKED)
def test_a_fused_model_has_as_many_parameters_as_before(variant: str) -> None:
    model = fused_model("BertModel", variant)
    before, report = count_parameters(model), str(patch_report(model))
    fuse_for_inference(model)
    assert count_parameters(model) == before and str(patch_report(model)) == report


@pytest.mark.parametrize("variant", ["factorized_random", "random"])
def test_compression_of_a_long_table_keeps_its_word(variant: str) -> None:
    """Few directions are looked for first (factorized_random), and then all (random, whose table has full rank)."""
    torch.manual_seed(0)
    layer = SynthesizerAttention(24, 3, variant, max_length=160).eval()
    with torch.no_grad():
        for parameter in layer.synthesizer.parameters():
            parameter.mul_(2 if variant == "factorized_random" else 5)
        hidden_states = torch.randn(2, 160, 24)
        expected, state = layer(hidden_states)[0], torch.random.get_rng_state()
        (report,) = fuse_for_inference(layer, tolerance=0.05).layers
        assert torch.equal(torch.random.get_rng_state(), state)
        assert report.rank is not None and 1 < report.rank <= (20 if variant == "factorized_random" else 80)
        assert report.error <= 0.05
        value = (hidden_states @ layer.value.weight.T + layer.value.bias).abs().max()
        assert ((layer(hidden_states)[0] - expected).abs().max() <= 0.05 * value * 24).item()
