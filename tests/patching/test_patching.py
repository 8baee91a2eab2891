"""patch_model, unpatch_model and patch_report on every head of BERT and T5."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention

from hf_synthesizer import (
    AlreadyPatchedError,
    InvalidConfigError,
    NotPatchedError,
    SynthesizerBertSelfAttention,
    SynthesizerConfig,
    SynthesizerT5Attention,
    patch_model,
    patch_report,
    unpatch_model,
)
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import HEADS, MIXTURES, batch, build, first_output, matrix


def run(model, inputs, **settings) -> torch.Tensor:
    with torch.no_grad():
        return first_output(model(**inputs, **settings))


def synthesized(model) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SynthesizerMixin)]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("head", [*HEADS, *LAYER_CLASSES])
def test_dot_product_alone_is_the_stock_model(head: str, backend: str) -> None:
    model, inputs = build(head), batch(head)
    if not head.startswith("MPNet"):  # which knows no backends
        model.set_attn_implementation(backend)
    before, parameters = run(model, inputs), model.num_parameters()
    patch_model(model, "dot_product")
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-5, atol=1e-5)
    assert model.num_parameters() == parameters  # the stock model's own, and no projections beside them


@pytest.mark.parametrize("variant", [m for m in MIXTURES if "dot_product" in m] + ["dot_product+salience"])
@pytest.mark.parametrize("head", [*HEADS, *LAYER_CLASSES])
def test_a_sum_with_dot_product_starts_as_the_stock_model(head: str, variant: str) -> None:
    model, inputs = build(head), batch(head)
    before = run(model, inputs)
    patch_model(model, variant, mixing="sum")
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-5, atol=1e-5)


def test_weight_decay_leaves_a_sum_with_dot_product_as_it_is() -> None:
    """Where no gradient says otherwise: before, this decay (as by 20,000 steps of AdamW at 5e-5 and 0.1) made 0.905 of α = 1."""
    model, inputs = build("BertModel"), batch("BertModel")
    before = run(model, inputs)
    patch_model(model, "random+dot_product", mixing="sum")
    plain = torch.nn.Parameter(torch.ones(1))
    mixing = [parameter for name, parameter in model.named_parameters() if "mixing" in name]
    optimizer = torch.optim.AdamW([*mixing, plain], lr=1e-3, weight_decay=0.1)
    for parameter in (*mixing, plain):
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(1000):
        optimizer.step()
    assert plain.item() == pytest.approx(0.905, abs=1e-3) and len(mixing) == 2
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [*HEADS, *LAYER_CLASSES])
def test_every_self_attention_is_swapped_and_no_cross_attention(head: str) -> None:
    model = build(head)
    returned = patch_model(model, "dense")
    assert returned is model
    expected = {"T5ForConditionalGeneration": 4, "T5Model": 4, "T5ForQuestionAnswering": 4}
    expected["T5ForSequenceClassification"] = 4
    expected |= {"BartForConditionalGeneration": 4, "WhisperForConditionalGeneration": 4}
    expected["AlbertForSequenceClassification"] = 1  # for both layers
    assert len(synthesized(model)) == expected.get(head, 2)
    assert not any(re.search("EncDecAttention|crossattention|encoder_attn", name) for name in synthesized(model))
    assert type(model).__name__ == f"Synthesizer{head}"
    assert isinstance(model, type(build(head)))


@pytest.mark.parametrize("head", [*HEADS, *LAYER_CLASSES])
def test_unpatch_gives_back_the_same_bits(head: str) -> None:
    model, inputs = build(head), batch(head)
    before, config, cls = run(model, inputs), model.config.to_dict(), type(model)
    names = list(model.state_dict())
    patch_model(model, "random")
    assert not torch.equal(run(model, inputs), before)
    assert unpatch_model(model) is model
    assert torch.equal(run(model, inputs), before)
    assert type(model) is cls and model.config.to_dict() == config and list(model.state_dict()) == names
    patch_model(model, "dense")  # and it can be patched again
    assert torch.equal(run(unpatch_model(model), inputs), before)


def test_unpatch_follows_the_model_to_another_dtype() -> None:
    model = unpatch_model(patch_model(build("BertModel"), "random").to(torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["bert", "t5"])
def test_another_model_of_the_process_is_not_affected(model_type: str) -> None:
    head = {"bert": "BertForSequenceClassification", "t5": "T5ForConditionalGeneration"}[model_type]
    stock, inputs = build(head), batch(head)
    before, config = run(stock, inputs), stock.config.to_dict()
    patched = patch_model(build(head), "random")
    run(patched, inputs, output_attentions=True)
    assert torch.equal(run(stock, inputs), before)
    assert stock.config.to_dict() == config and not synthesized(stock)
    assert type(build(head)) is type(stock)
    stock.set_attn_implementation("eager")
    assert len(stock(**inputs, output_attentions=True)[-1 if model_type == "bert" else "decoder_attentions"]) == 2


@pytest.mark.feature("deepcopy and pickle")
@matrix("BertForSequenceClassification", "T5ForConditionalGeneration")
def test_deepcopy_and_pickle(variant: str, head: str) -> None:
    model, inputs = patch_model(build(head), variant), batch(head)
    expected = run(model, inputs)
    twins = [copy.deepcopy(model)]
    if head != "Wav2Vec2ForSequenceClassification":  # whose weight norm of torch cannot be pickled
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert type(twin) is type(model) and type(twin.config) is type(model.config)
        assert torch.equal(run(twin, inputs), expected)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
        stock = unpatch_model(twin)
        assert not synthesized(stock) and synthesized(model)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([0], ["encoder.layer.0"]),
        ([0, -1], ["encoder.layer.0", "encoder.layer.3"]),
        (slice(1, None, 2), ["encoder.layer.1", "encoder.layer.3"]),
        (np.array([1, 3]), ["encoder.layer.1", "encoder.layer.3"]),
        (range(2), ["encoder.layer.0", "encoder.layer.1"]),
        (2, ["encoder.layer.2"]),
        (lambda name, module: ".3." in name, ["encoder.layer.3"]),
        ({"encoder": [1]}, ["encoder.layer.1"]),
    ],
    ids=["list", "negative", "slice", "array", "range", "int", "predicate", "dict"],
)
def test_layer_selection(layers, expected: list[str]) -> None:
    model = patch_model(build("BertModel", num_hidden_layers=4), "random", layers=layers)
    assert [name.removesuffix(".attention.self") for name in synthesized(model)] == expected


def test_layer_selection_by_stack() -> None:
    model = patch_model(build("T5ForConditionalGeneration"), "random", layers={"encoder": True, "decoder": [1]})
    assert [name.removesuffix(".layer.0.SelfAttention") for name in synthesized(model)] == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.1",
    ]


def test_hybrids() -> None:
    model = patch_model(
        build("BertModel", num_hidden_layers=4), {0: "random", 1: "factorized_random", -1: "dense"}, rank=3
    )
    found = {
        layer.attention.self.layer_idx: layer.attention.self.synthesizer.config
        for layer in model.encoder.layer
        if isinstance(layer.attention.self, SynthesizerMixin)
    }
    assert {index: config.variant for index, config in found.items()} == {
        0: "random",
        1: "factorized_random",
        3: "dense",
    }
    assert found[1].rank == 3
    model = patch_model(build("T5Model"), {"encoder": "dense", "encoder.1": SynthesizerConfig("random", max_length=9)})
    assert [model.get_submodule(name).synthesizer.config.variant for name in synthesized(model)] == ["dense", "random"]
    assert model.encoder.block[1].layer[0].SelfAttention.synthesizer.max_length == 9


def test_max_length_defaults_to_the_models_own() -> None:
    assert patch_model(build("BertModel"), "random").encoder.layer[0].attention.self.synthesizer.max_length == 24
    model = patch_model(build("T5Model"), SynthesizerConfig("random"), max_length=7)
    assert model.encoder.block[0].layer[0].SelfAttention.synthesizer.max_length == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_new_modules_take_after_the_old_ones(variant: str, dtype: torch.dtype, training: bool) -> None:
    model = build("BertModel").to(dtype).train(training)
    patch_model(model, variant)
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {dtype}
    assert all(module.training is training for module in model.modules())


def test_a_module_on_the_meta_device_is_patched_there() -> None:
    with torch.device("meta"):
        model = build("BertModel")
    patch_model(model, "dense+salience")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_drop_in_classes_are_stock_classes() -> None:
    assert issubclass(SynthesizerBertSelfAttention, BertSelfAttention)
    assert issubclass(SynthesizerT5Attention, T5Attention)


def test_hooks_move_with_the_layer() -> None:
    model, calls = build("BertModel"), []
    handle = model.encoder.layer[0].attention.self.register_forward_hook(lambda *_: calls.append(1))
    run(patch_model(model, "random"), batch("BertModel"))
    assert calls == [1]
    handle.remove()
    run(model, batch("BertModel"))
    run(unpatch_model(model), batch("BertModel"))
    assert calls == [1]


def test_recorded_outputs_are_not_doubled_by_a_patch() -> None:
    model, inputs = build("BertForSequenceClassification"), batch("BertForSequenceClassification")
    model.set_attn_implementation("eager")
    settings = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        for change in (lambda m: m, lambda m: patch_model(m, "random"), unpatch_model):
            output = change(model)(**inputs, **settings)
            assert len(output.attentions) == 2 and len(output.hidden_states) == 3


def test_the_report_counts_and_explains() -> None:
    model = build("T5ForConditionalGeneration")
    before = sum(parameter.numel() for parameter in model.parameters())
    patch_model(model, "random", layers={"encoder": [0]})
    report = patch_report(model)
    assert [layer.name for layer in report.swapped] == ["encoder.block.0.layer.0.SelfAttention"]
    assert report.swapped[0].after == 3 * 24 * 24 and report.swapped[0].before == 2 * 24 * 18
    assert report.parameters_before == before
    assert report.parameters_after == sum(parameter.numel() for parameter in model.parameters())
    notes = {layer.name: layer.note for layer in report.left}
    assert "cross-attention" in notes["decoder.block.0.layer.1.EncDecAttention"]
    assert notes["encoder.block.1.layer.0.SelfAttention"] == "not selected"
    text = str(report)
    assert "1 of 6 attention layers synthesized" in text and "864 → 1,728" in text


def test_the_report_of_bert_counts_biases_and_buffers() -> None:
    model = build("BertModel")
    before = sum(parameter.numel() for parameter in model.parameters())
    report = patch_report(patch_model(model, "fixed_random"))
    assert report.parameters_before == before
    assert report.swapped[0].after == 0 and report.swapped[0].before == 2 * (24 * 24 + 24)


def snapshot(model) -> tuple:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {name: (id(module), type(module)) for name, module in model.named_modules()}
    return state, modules, type(model.config), copy.deepcopy(model.config.__dict__)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("no_such", {}),
        ("random+no_such", {}),
        ("random", {"layers": [9]}),
        ("random", {"rank": 3}),
        ("factorized_dense", {"factors": (2, 2)}),
        ({0: "random", 9: "dense"}, {}),
        ("random", {"unknown": 1}),
    ],
)
def test_a_failed_patch_leaves_the_model_as_it_was(variant, options) -> None:
    model = build("BertForSequenceClassification")
    state, *others = snapshot(model)
    with pytest.raises(ValueError):
        patch_model(model, variant, **options)
    state_after, *others_after = snapshot(model)
    assert others_after == others
    assert all(torch.equal(state[name], state_after[name]) for name in state)


def test_a_failure_while_building_a_layer_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("BertModel")
    state, *others = snapshot(model)
    original, calls = SynthesizerMixin.replace_projections, []

    def fail_on_the_second(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        original(self, *arguments)

    monkeypatch.setattr(SynthesizerMixin, "replace_projections", fail_on_the_second)
    with pytest.raises(MemoryError):
        patch_model(model, "random")
    _, *others_after = snapshot(model)
    assert others_after == others


def test_patching_twice_is_an_error() -> None:
    model = patch_model(build("BertModel"), "random", layers=[0])
    with pytest.raises(AlreadyPatchedError, match=r"patched already.*\{0: 'random', 1: 'dense'\}.*unpatch_model"):
        patch_model(model, "dense", layers=[1])


def test_a_head_over_a_patched_base_model_is_an_error() -> None:
    model = build("BertForSequenceClassification")
    patch_model(model.bert, "random")
    with pytest.raises(AlreadyPatchedError):
        patch_model(model, "dense")
    with pytest.raises(NotPatchedError, match="one of its submodules was patched"):
        unpatch_model(model)
    unpatch_model(model.bert)
    patch_model(model, "dense")


def test_unpatching_a_stock_model_is_an_error() -> None:
    with pytest.raises(NotPatchedError, match="holds no synthesized attention"):
        unpatch_model(build("BertModel"))


def test_options_of_a_hybrid_must_be_used() -> None:
    with pytest.raises(InvalidConfigError, match="No variant of the hybrid uses rank=3"):
        patch_model(build("BertModel"), {0: "random", 1: "dense"}, rank=3)


@pytest.mark.parametrize("spec", [{1: "random", -1: "dense"}, {0: "random", -2: "random"}], ids=str)
def test_a_hybrid_that_names_a_layer_twice(spec: dict) -> None:
    model = build("BertModel")
    with pytest.raises(InvalidConfigError, match="names layer . twice.*Leave one of them out"):
        patch_model(model, spec)
    assert not synthesized(model)
