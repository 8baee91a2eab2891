"""What a model costs on paper, what a layer takes here, and whether a wrong route is found."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_synthesizer import InvalidConfigError, SequenceTooLongError, SynthesizerConfig, count_flops, patch_model
from hf_synthesizer.attend import ROUTES
from hf_synthesizer.measuring.block import bench_block
from hf_synthesizer.measuring.costs import cost_report, stock_config
from hf_synthesizer.measuring.doctor import examine
from tests.helpers.models import MAX_LENGTH, build


def llama() -> LlamaForCausalLM:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **sizes)).eval()


def test_costs_are_those_of_the_models_themselves() -> None:
    stock = build("BertForSequenceClassification")
    model = patch_model(copy.deepcopy(stock), {0: "dense+salience"})
    report = cost_report(model, [6, MAX_LENGTH])
    for cost in report.costs:
        tokens = torch.zeros(1, cost.length, dtype=torch.long)
        for which, counted in ((model, cost.flops), (stock, cost.stock_flops)):
            which.set_attn_implementation("eager")
            assert counted == count_flops(which, input_ids=tokens)
    assert report.layers.parameters_before == sum(parameter.numel() for parameter in stock.parameters())
    assert str(report).count("\n") > 6 and "1 of 2 attention layers" in str(report)
    with pytest.raises(SequenceTooLongError, match=f"takes {MAX_LENGTH} at most"):
        cost_report(model, [MAX_LENGTH + 1])


def test_layers_that_choose_their_keys_are_named_as_counted_whole() -> None:
    groups = [SynthesizerConfig("routing", heads=[1]), SynthesizerConfig("dense", heads=[0])]
    report = cost_report(
        patch_model(build("BertModel", num_hidden_layers=3), {0: "sparse_strided", 1: "random", 2: groups}), [8]
    )
    names = [f"encoder.layer.{layer}.attention.self" for layer in (0, 2)]
    assert report.to_dict()["counted_whole"] == names
    assert str(report).endswith(f"than is counted here: {', '.join(names)}.")
    assert "choose" not in str(cost_report(patch_model(build("BertModel"), "dense"), [8]))


@pytest.mark.parametrize("variant", ["random", "random+salience"])
def test_the_cache_of_a_synthesized_layer_is_counted(variant: str) -> None:
    model = patch_model(llama(), variant, max_length=16)
    (cost,) = cost_report(model, [16]).costs
    cache = model(torch.zeros(1, 16, dtype=torch.long), use_cache=True).past_key_values
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert (cost.cache_bytes, cost.stock_cache_bytes) == (
        held,
        2 * 2 * 16 * 16 * 4,
    )  # 2 layers of keys and values, float32
    assert cost.cache_bytes < cost.stock_cache_bytes


def test_the_stock_config_comes_back() -> None:
    stock = llama()
    before = stock.config.to_dict()
    config = stock_config(patch_model(stock, "random", max_length=16).config)
    assert type(config) is LlamaConfig and config.to_dict() == before


@pytest.mark.parametrize("training", [False, True])
def test_one_layer_of_any_model_type_is_timed(training: bool) -> None:
    for model in (build("T5ForConditionalGeneration"), llama()):
        report = bench_block(model.config, ["random", "routing"], [8], seconds=0.01, batch_size=2, training=training)
        stock, random, routing = report.times
        assert stock.speedup == 1 and random.milliseconds and random.speedup
        assert bool(routing.refused) == (report.model_type == "llama")  # which is a decoder
        assert "one layer of" in str(report)
    with pytest.raises(InvalidConfigError, match="must be positive"):
        bench_block(model.config, lengths=[0])


def test_a_route_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ROUTES["static"].attention
    wrong = ROUTES["static"]._replace(attention=lambda *args: right(*args) + 1e-3)
    monkeypatch.setitem(ROUTES, "static", wrong)
    diagnosis = examine()
    assert not diagnosis.passed and "DIFFERS" in str(diagnosis)
    assert [check.route for check in diagnosis.routes if not check.passed] == ["static"]


def test_the_costs_of_an_encoder_decoder() -> None:
    report = cost_report(patch_model(build("T5ForConditionalGeneration"), "factorized_dense"), [8])
    assert 0 < report.costs[0].cache_bytes < report.costs[0].stock_cache_bytes and report.costs[0].flops > 0
