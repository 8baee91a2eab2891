"""Layers that are dropped after a patch: what is there is saved, loaded and unpatched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_synthesizer import UnsupportedModelError, patch_model, unpatch_model
from tests.helpers.models import batch, build, first_output

SPEC = {0: "random", 1: "dense", 3: "random+dot_product"}
DROPS: dict[str, tuple[str, dict[str, Any], str, slice]] = {
    "the last layers of BERT": (
        "BertForSequenceClassification",
        {"num_hidden_layers": 4},
        "bert.encoder.layer",
        slice(3),
    ),
    "every second layer of BERT": ("BertModel", {"num_hidden_layers": 4}, "encoder.layer", slice(None, None, 2)),
    "the first layers of BERT": ("BertModel", {"num_hidden_layers": 4}, "encoder.layer", slice(2, None)),
    "layers of T5's encoder": ("T5EncoderModel", {"num_layers": 4}, "encoder.block", slice(2)),
    "layers of T5's decoder": ("T5ForConditionalGeneration", {"num_layers": 4}, "decoder.block", slice(2)),
    "layers of DistilBERT": (
        "DistilBertForSequenceClassification",
        {"n_layers": 4},
        "distilbert.transformer.layer",
        slice(2),
    ),
    "layers of BART's encoder": (
        "BartForConditionalGeneration",
        {"encoder_layers": 4},
        "model.encoder.layers",
        slice(3),
    ),
    "every second layer of ModernBERT": (
        "ModernBertForSequenceClassification",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        "model.layers",
        slice(None, None, 2),
    ),
}


def drop(model: PreTrainedModel, name: str, kept: slice) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, model.get_submodule(name)[kept])  # type: ignore[index]


@pytest.mark.parametrize(("head", "settings", "name", "kept"), DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("counted", [False, True], ids=["", "the user has set the number"])
def test_what_is_there_is_saved(
    tmp_path: Path, head: str, settings: dict[str, Any], name: str, kept: slice, counted: bool
) -> None:
    stock = build(head, **settings)
    stacks = "encoder" if "encoder" in name else "decoder" if "decoder" in name else None
    spec = {f"{stacks}.{layer}": variant for layer, variant in SPEC.items()} if stacks and "For" in head else SPEC
    spec = SPEC if head.startswith("Bert") else spec
    model = patch_model(stock, spec, max_length=24).eval()
    drop(model, name, kept)
    if (
        counted
        and hasattr(model.config, "num_hidden_layers")
        and "layer_types" not in settings
        and "decoder" not in name
    ):
        model.config.num_hidden_layers = len(model.get_submodule(name))  # type: ignore[arg-type]
    inputs = batch(head)
    with torch.no_grad():
        expected = first_output(model(**inputs))
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(first_output(loaded(**inputs)), expected)
        assert len(loaded.get_submodule(name)) == len(model.get_submodule(name))  # type: ignore[arg-type]
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("head", "settings", "name"),
    [
        ("T5EncoderModel", {"num_layers": 3}, "encoder.block"),  # the first one has the position bias of all
        (
            "ModernBertForSequenceClassification",
            {"num_hidden_layers": 3},
            "model.layers",
        ),  # the first one has a norm less
    ],
)
def test_layers_that_no_config_can_describe_are_refused_and_the_config_stays(
    tmp_path: Path, head: str, settings: dict[str, Any], name: str
) -> None:
    model = patch_model(build(head, **settings), "random", max_length=24)
    drop(model, name, slice(1, None))
    before = model.config.to_dict()
    with pytest.raises(
        UnsupportedModelError, match=r"patched with 3 layers in its encoder, and has 2 now.*before you save"
    ):
        model.save_pretrained(tmp_path)
    assert model.config.to_dict() == before and not list(tmp_path.iterdir())


def test_unpatching_gives_each_layer_that_is_left_its_own_attention_back() -> None:
    model = build("BertModel", num_hidden_layers=4)
    inputs = batch("BertModel")
    stock = build("BertModel", num_hidden_layers=4)
    stock.load_state_dict(model.state_dict())
    patch_model(model, "random")
    for whole in (model, stock):
        drop(whole, "encoder.layer", slice(1, None, 2))
    unpatch_model(model)
    assert isinstance(model.encoder.layer[0].attention.self.query, nn.Linear)
    assert torch.equal(first_output(model(**inputs)), first_output(stock(**inputs)))
