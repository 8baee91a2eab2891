"""Models whose weights are not in memory: accelerate brings those of each module when it is called, and takes them away after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_synthesizer import (
    FusedModelError,
    SynthesizerConfig,
    UnsupportedModelError,
    fuse_for_inference,
    patch_model,
    transfer_attention,
    unpatch_model,
)
from tests.helpers.models import RELATIVES, VARIANTS, WHOLE_SEQUENCE, batch, build, first_output
from tests.synthesizers.test_laws import randomize_synthesizers

CPU = torch.device("cpu")
ENCODER = "BertForSequenceClassification"
DIFFERING: dict[str, Any] = {
    "heads of tables": [SynthesizerConfig("random", heads=[0]), SynthesizerConfig("factorized_random", heads=[2])],
    "heads of rows": [
        SynthesizerConfig("dense+salience", heads=[0]),
        SynthesizerConfig("factorized_dense", heads=[1]),
    ],
}
SPECS: dict[str, Any] = {**{name: name for name in (*VARIANTS, *RELATIVES)}, **DIFFERING}
FAMILIES = (ENCODER, "T5ForConditionalGeneration", "GPT2LMHeadModel", "LlamaForCausalLM", "Phi3ForCausalLM")
"""Encoder, position bias, fused projection, shared values, and a layer that keeps the stock forward."""


def patched(spec: str, head: str = ENCODER) -> PreTrainedModel:
    layers = {"encoder": True} if head.startswith("T5") and spec in WHOLE_SEQUENCE else None
    model = patch_model(build(head), SPECS[spec], layers=layers)
    randomize_synthesizers(model)
    return model


@torch.no_grad()
def outputs(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return first_output(model(**given))


def served() -> list[tuple[str, str]]:
    decoders = FAMILIES[2:]
    return [(spec, head) for head in FAMILIES for spec in SPECS if not (spec in WHOLE_SEQUENCE and head in decoders)]


@pytest.mark.parametrize(("spec", "head"), served())
def test_a_model_whose_weights_are_offloaded_answers_as_before(spec: str, head: str) -> None:
    model, given = patched(spec, head), batch(head)
    expected = outputs(model, given)
    cpu_offload(model, execution_device=CPU, offload_buffers=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(outputs(model, given), expected)


@pytest.mark.parametrize("spec", ["random", "random+dot_product", "dense+salience", *DIFFERING])
def test_a_model_on_disk_answers_as_before(spec: str, tmp_path: Path) -> None:
    model, given = patched(spec), batch(ENCODER)
    expected = outputs(model, given)
    disk_offload(model, str(tmp_path), execution_device=CPU)
    assert torch.equal(outputs(model, given), expected)


DEVICE_MAPS = {
    "all": {"": "disk"},
    "the encoder": {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "cpu", "classifier": "cpu"},
    "one layer": {
        "bert.embeddings": "cpu",
        "bert.encoder.layer.0": "cpu",
        "bert.encoder.layer.1": "disk",
        "bert.pooler": "cpu",
        "classifier": "cpu",
    },
}


@pytest.mark.parametrize("where", DEVICE_MAPS)
@pytest.mark.parametrize("spec", ["random", "random+dot_product", "dense+salience", "sparse_fixed", *DIFFERING])
def test_a_checkpoint_is_loaded_onto_disk(spec: str, where: str, tmp_path: Path) -> None:
    model, given = patched(spec), batch(ENCODER)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", device_map=DEVICE_MAPS[where], offload_folder=tmp_path / "offload"
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(outputs(loaded, given), outputs(model, given))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert torch.equal(outputs(again, given), outputs(model, given))


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "GPT2LMHeadModel", "Phi3ForCausalLM"])
def test_a_dispatched_model_is_really_patched(head: str) -> None:
    stock, given = build(head), batch(head)
    before = outputs(stock, given)
    expected = outputs(patched_alike(copy.deepcopy(stock)), given)
    dispatch_model(stock, {"": "cpu"}, force_hooks=True)
    model = patched_alike(stock)
    found = outputs(model, given)
    assert torch.equal(found, expected) and not torch.allclose(found, before)
    assert torch.equal(outputs(unpatch_model(model), given), before)
    remove_hook_from_submodules(model)
    assert torch.equal(outputs(model, given), before)


def patched_alike(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    patch_model(model, "dense+salience")
    torch.manual_seed(1)
    randomize_synthesizers(model)
    return model


def test_an_offloaded_model_is_not_patched() -> None:
    model, given = build(ENCODER), batch(ENCODER)
    expected = outputs(model, given)
    cpu_offload(model, execution_device=CPU)
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        patch_model(model, "random")
    assert torch.equal(outputs(model, given), expected)


def test_a_layer_with_a_forward_of_its_own_is_not_patched() -> None:
    model, given = build(ENCODER), batch(ENCODER)
    layer = model.bert.encoder.layer[0].attention.self
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    expected = outputs(model, given)
    with pytest.raises(UnsupportedModelError, match="forward"):
        patch_model(model, "random")
    assert torch.equal(outputs(model, given), expected)


def test_what_needs_the_weights_of_an_offloaded_model_says_so() -> None:
    model, given = patched("random"), batch(ENCODER)
    expected = outputs(model, given)
    cpu_offload(model, execution_device=CPU)
    with pytest.raises(FusedModelError, match="offloaded"):
        fuse_for_inference(model)
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        unpatch_model(model)
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        transfer_attention(model, build(ENCODER), [given])
    assert torch.equal(outputs(model, given), expected)
