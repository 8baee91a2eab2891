"""What `benchmarks/model_types/survey.py` found holds for this Transformers: the same layer classes for all types, the same laws for a few."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

import hf_synthesizer
from benchmarks.measurements.records import read
from benchmarks.model_types import examine, survey, tiny_models
from hf_synthesizer import (
    SynthesizerBertSelfAttention,
    UnsupportedModelError,
    list_model_types,
    patch_model,
    unpatch_model,
)
from hf_synthesizer.layers import synthesizer_class
from hf_synthesizer.layers.finding.model_types import served_types
from hf_synthesizer.models.model_mixin import SynthesizerModelMixin

ROWS = {row["model_type"]: row for row in read(survey.OUTPUT)}
SERVED = {name: row for name, row in ROWS.items() if row["status"] == "served"}
same_transformers = pytest.mark.skipif(
    ROWS["bert"]["transformers"] != version("transformers"),
    reason="the results are of another version of Transformers",
)


def test_two_hundred_types_are_served_none_is_wrong_and_each_refusal_says_why() -> None:
    assert len(SERVED) >= 200
    assert not [name for name, row in ROWS.items() if row["status"] not in ("served", "refused", "not built")]
    assert all(row["why"] for row in ROWS.values() if row["status"] != "served")


def test_list_model_types_names_the_types_that_passed() -> None:
    assert served_types() == {name: row["layer_class"] for name, row in SERVED.items()}
    assert set(SERVED) <= set(list_model_types())


@same_transformers
@pytest.mark.parametrize("model_type", SERVED)
def test_each_served_type_has_the_layer_class_of_the_table(model_type: str) -> None:
    row = SERVED[model_type]
    classes = [getattr(hf_synthesizer, f"Synthesizer{name}") for name in row["attention"].split()]
    assert examine.together(examine.layer_class_of(cls.stock_class) for cls in classes) == row["layer_class"]
    for cls in classes:
        keeps_stock_forward = synthesizer_class(cls.stock_class, keeps_stock_forward=True)
        for made in (cls, keeps_stock_forward):
            assert list(inspect.signature(made.forward).parameters) == list(
                inspect.signature(cls.stock_class.forward).parameters
            )


@same_transformers
@pytest.mark.parametrize("model_type", survey.QUICK)
def test_the_laws_hold_for_a_type_of_each_layer_class(model_type: str) -> None:
    assert examine.examine(model_type) == ROWS[model_type]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v32", "by the name of the attention backend"),
        ("diffllama", "attends more than once"),
        ("doge", "adds logits of its own to its mask"),
        ("gpt_oss", "passes s_aux= on"),
        ("moshi", "says its size in a way"),
    ],
)
def test_what_a_layer_cannot_honour_is_refused_and_the_model_is_as_it_was(model_type: str, reason: str) -> None:
    tiny = tiny_models.build(model_type)
    with torch.no_grad():
        expected = tiny_models.run(tiny.model, tiny.inputs)
        with pytest.raises(UnsupportedModelError, match=reason):
            tiny_models.run(patch_model(tiny.model, "random", max_length=64), tiny.inputs)
        if isinstance(tiny.model, SynthesizerModelMixin):
            unpatch_model(tiny.model)
        assert all(map(torch.equal, expected, tiny_models.run(tiny.model, tiny.inputs)))


def test_under_eager_no_mask_means_that_everybody_sees_everything() -> None:
    config = BertConfig(
        hidden_size=24, num_attention_heads=3, attn_implementation="eager", attention_probs_dropout_prob=0
    )
    stock = BertSelfAttention(config, is_causal=True, layer_idx=0)
    attention = SynthesizerBertSelfAttention(config, is_causal=True, layer_idx=0, synthesizer="dot_product")
    patched = type(attention).from_stock(stock, attention.synthesizer.config)
    hidden_states = torch.randn(2, 5, 24)
    torch.testing.assert_close(patched(hidden_states)[0], stock(hidden_states)[0])


@pytest.mark.slow
@same_transformers
@pytest.mark.parametrize("model_type", ROWS)
def test_the_laws_hold_for_every_type(model_type: str) -> None:
    assert survey.isolated(model_type) == ROWS[model_type]
