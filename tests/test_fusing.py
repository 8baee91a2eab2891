"""fuse_for_inference changes nothing but the time, is undone by unfuse, and says no where it should."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_synthesizer import FusedModelError, SynthesizerAttention, fuse_for_inference, patch_model, unfuse
from hf_synthesizer.inference.fusing import FusedTable
from tests.models import batch, build, decoder, first_output, mask
from tests.test_decoding import generate
from tests.test_laws import randomize_synthesizers

FUSABLE = ("random", "fixed_random", "factorized_random", "random+salience", "random+factorized_random")
MIXED = ("random+dense", "factorized_random+dot_product", "random+dense+salience")
HEADS = ("BertForSequenceClassification", "BertLMHeadModel", "T5ForConditionalGeneration")


def fused_model(head: str, variant: str):
    model = patch_model(build(head), variant)
    randomize_synthesizers(model)
    return model


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
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_generation(family: str, variant: str) -> None:
    model = patch_model(decoder(family), variant)
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
    fused = layer.synthesizer.fused
    assert isinstance(fused, FusedTable) and fused.table is None
    weights, thin = whole.synthesizer.fused.table, fused.left @ fused.right
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


def test_parameters_that_change_behind_a_fused_layer() -> None:
    model = patch_model(build("BertModel"), "random")
    fuse_for_inference(model)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.synthesizer.table.add_(1)
    with pytest.raises(FusedModelError, match="changed after fuse_for_inference"):
        model(**batch("BertModel"))


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
