"""A model that was made without memory begins as every other one, once Transformers has initialised it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertPreTrainedModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
)

from hf_synthesizer import SynthesizerConfig, list_variants, patch_model
from hf_synthesizer.layers.guard import Guard
from tests.helpers.models import MIXTURES, batch, build, first_output

SPECS: dict[str, Any] = {
    **{name: name for name in (*list_variants(), *MIXTURES)},
    "sum": SynthesizerConfig("random+dense+factorized_random+dot_product", mixing="sum"),
    "handcrafted": SynthesizerConfig("random+salience", init="handcrafted"),
    "groups of heads": [SynthesizerConfig("dense", heads=[0]), SynthesizerConfig("routing", heads=[2])],
}
HEADS = ("BertModel", "T5EncoderModel", "ModernBertForSequenceClassification")


def from_nothing(like: PreTrainedModel) -> PreTrainedModel:
    """A model of this class and config, made on the meta device; memory that it is given is full of what no weight is."""
    with torch.device("meta"):
        model = type(like)(like.config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
        elif tensor.dtype == torch.int64 and tensor.shape == (1,):
            tensor.fill_(7)
    model.init_weights()
    return model.eval()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("head", HEADS)
def test_a_model_without_memory_begins_as_others_do(head: str, spec: Any) -> None:
    settings = {"num_heads": 3} if head.startswith("T5") else {}
    patched = patch_model(build(head, **settings), dict.fromkeys(range(2), spec), max_length=24)
    usual, model = type(patched)(patched.config).eval(), from_nothing(patched)
    first_output(model(**batch(head))).sum().backward()
    expected = usual.state_dict()
    for name, found in model.state_dict().items():
        numbers, wanted = found.double(), expected[name].double()
        assert numbers.isfinite().all(), name
        if wanted.numel() == 1 or wanted.std() == 0:
            assert torch.equal(found, expected[name]), name
        elif wanted.numel() > 100 and "projection" not in name:  # other random numbers of the same size
            assert 0.6 < numbers.std() / wanted.std() < 1.7, (name, numbers.std(), wanted.std())


@pytest.mark.parametrize(
    "head", ["LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "T5ForConditionalGeneration"]
)
@pytest.mark.parametrize("spec", [SPECS["random+dot_product"], [SynthesizerConfig("random", heads=[0])]], ids=str)
def test_stock_parts_of_decoders_begin_as_stock(head: str, spec: Any) -> None:
    model = patch_model(build(head), dict.fromkeys(range(2), spec), max_length=24)
    usual, model = type(model)(model.config), from_nothing(model)
    for name, tensor in usual.state_dict().items():
        found = model.state_dict()[name].double()
        assert found.isfinite().all(), name
        if tensor.dim() == 2 and ".synthesizer." not in name:
            assert 0.6 < found.std() / tensor.double().std() < 1.7, name


def test_a_fixed_table_begins_with_numbers_and_not_with_memory() -> None:
    model = from_nothing(patch_model(build("BertModel"), "fixed_random"))
    tables = [tensor for name, tensor in model.named_buffers() if name.endswith("synthesizer.table")]
    assert len(tables) == 2 and all(0.015 < table.std() < 0.025 for table in tables)
    assert not torch.equal(*tables)


class Around(BertPreTrainedModel):
    """A user's model around a patched one."""

    def __init__(self, config: BertConfig, inner: PreTrainedModel):
        super().__init__(config)
        self.bert = inner
        self.stars = nn.Linear(config.hidden_size, 5)
        self.post_init()


@pytest.mark.parametrize("variant", ["random", "dense+salience", "dense+dot_product", "routing"])
def test_a_model_around_a_patched_one_does_not_start_it_afresh(tmp_path: Path, variant: str) -> None:
    patched = patch_model(build("BertModel"), variant)
    patched.save_pretrained(tmp_path)
    for inner in (patched, AutoModel.from_pretrained(tmp_path)):
        before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
        after = Around(inner.config, inner).bert.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("head", ["BertModel", "T5ForConditionalGeneration", "GPT2LMHeadModel"])
def test_loading_initialises_nothing_that_was_loaded(
    tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch_model(build(head), "random+dot_product", max_length=24)
    model.save_pretrained(tmp_path)
    made: list[Any] = []
    monkeypatch.setattr("hf_synthesizer.synthesizers.base.Synthesizer.new", made.append)
    loaded = type(model).from_pretrained(tmp_path)
    assert not made
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_guards_of_a_model_without_memory() -> None:
    model = patch_model(build("BertModel"), "dense")
    guards = [module for module in from_nothing(model).modules() if isinstance(module, Guard)]
    own = [module for module in model.modules() if isinstance(module, Guard)]
    assert [int(guard.weight) for guard in guards] == [int(guard.weight) for guard in own]


def test_a_patched_part_of_a_composite_model_without_memory() -> None:
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        patch_model(build("T5Model"), "random+dot_product").config,
        patch_model(build("BertLMHeadModel"), "dense").config,
    )
    usual = EncoderDecoderModel(config)
    with torch.device("meta"):
        model = EncoderDecoderModel(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.init_weights()
    for name, tensor in usual.state_dict().items():
        found = model.state_dict()[name].double()
        assert found.isfinite().all(), name
        if tensor.numel() > 100:
            assert 0.6 < found.std() / tensor.double().std() < 1.7, name
