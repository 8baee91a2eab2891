"""A checkpoint is loaded with layers that are served as they were when it was saved, whatever another Transformers would choose."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_synthesizer import CheckpointMismatchError, SynthesizerConfig, patch_model
from hf_synthesizer.layers.finding import layer_classes
from hf_synthesizer.layers.patched import synthesized_layers
from hf_synthesizer.layers.stock_forward import StockForwardLayer
from tests.helpers.models import batch, build, first_output

HEADS = ("BertModel", "LlamaForCausalLM", "ViTForImageClassification", "ModernBertForSequenceClassification")
VARIANTS: dict[str, Any] = {
    "random": "random",
    "dot_product": "dot_product",
    "random+dot_product": "random+dot_product",
    "some heads": [SynthesizerConfig("random", heads=[1])],
}
every_way = pytest.mark.parametrize(
    ("head", "variant"), [(head, variant) for head in HEADS for variant in VARIANTS.values()],
    ids=[f"{head}-{variant}" for head in HEADS for variant in VARIANTS],
)  # fmt: skip
STRANGE = frozenset({"contiguous", "reshape"})
"""Names in every stock forward; one that is not understood is what a harmless rename in another Transformers looks like."""


@pytest.fixture
def rename(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this no class of ours understands a stock forward any more."""

    def run() -> None:
        monkeypatch.setattr(layer_classes, "_CLASSES", {})
        monkeypatch.setattr(layer_classes, "UNDERSTOOD", layer_classes.UNDERSTOOD - STRANGE)

    return run


def is_stock_forward(model: PreTrainedModel) -> bool:
    return isinstance(next(layer for _, layer in synthesized_layers(model)), StockForwardLayer)


def saved(head: str, variant: Any, folder: Path) -> tuple[PreTrainedModel, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layers = build(head)
    model = patch_model(layers, dict.fromkeys(range(2), variant), max_length=24).eval()
    model.save_pretrained(folder)
    inputs = batch(head)
    with torch.no_grad():
        return model, first_output(model(**inputs)), inputs


def same_answers(loaded: PreTrainedModel, expected: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        assert torch.equal(first_output(loaded(**inputs)), expected)


@every_way
def test_a_checkpoint_after_a_rename_in_transformers(
    tmp_path: Path, head: str, variant: Any, rename: Callable[[], None]
) -> None:
    model, expected, inputs = saved(head, variant, tmp_path)
    rename()
    assert is_stock_forward(patch_model(build(head), dict.fromkeys(range(2), variant), max_length=24))
    try:
        loaded = type(model).from_pretrained(tmp_path)
    except CheckpointMismatchError as error:  # which rows a forward can do without is known of understood ones alone
        assert variant == VARIANTS["some heads"] and "with some rows of" in str(error)
        assert "Load it with the transformers that saved it" in str(error)
    else:
        assert is_stock_forward(loaded) == is_stock_forward(model)
        same_answers(loaded, expected, inputs)


@every_way
def test_a_checkpoint_of_before_a_rename_in_transformers(
    tmp_path: Path, head: str, variant: Any, rename: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(layer_classes, "_CLASSES", {})
        context.setattr(layer_classes, "UNDERSTOOD", layer_classes.UNDERSTOOD - STRANGE)
        model, expected, inputs = saved(head, variant, tmp_path)
        assert is_stock_forward(model)
    loaded = patch_model(build(head), "random").__class__.from_pretrained(tmp_path)
    assert is_stock_forward(loaded)
    same_answers(loaded, expected, inputs)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_a_layer_that_is_served_as_it_was_can_be_pickled(tmp_path: Path, rename: Callable[[], None]) -> None:
    model, expected, inputs = saved("BertModel", "dense", tmp_path)
    rename()
    loaded = type(model).from_pretrained(tmp_path)
    name = type(next(layer for _, layer in synthesized_layers(loaded))).__name__
    assert name == "SynthesizerBertSelfAttentionAsSaved"
    same_answers(pickle.loads(pickle.dumps(loaded)), expected, inputs)


def test_config_json_says_how_layers_are_served(tmp_path: Path) -> None:
    saved("LlamaForCausalLM", [SynthesizerConfig("random", heads=[1])], tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["synthesizer"]
    assert stored["forwards"] == [{"forward": "stock", "cut": ["q_proj"]}]
    assert stored["served_by"] == {"decoder": [0, 0]}
    patch_model(build("LlamaForCausalLM"), {1: "random"}, max_length=24).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["synthesizer"]
    assert stored["forwards"] == [{"forward": "own", "gone": ["k_proj", "q_proj"]}]
    assert stored["served_by"] == {"decoder": [None, 0]}


def test_a_layer_that_this_version_cannot_serve_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *_ = saved("BertModel", "dense", tmp_path)
    monkeypatch.setattr(layer_classes, "_CLASSES", {})
    monkeypatch.setattr(layer_classes, "LAYER_CLASSES", [])
    with pytest.raises(
        CheckpointMismatchError,
        match=r"layer 'encoder\.0' was served by a forward of its own, without key, query, but here it would be served by the "
        r"stock forward\. Load it with the transformers that saved it \(\d.*patch the base model again",
    ):
        type(model).from_pretrained(tmp_path)
