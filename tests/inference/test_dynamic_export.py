"""torch.export and ONNX of a model of each layer class, with a dynamic batch and dynamic lengths."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from transformers import PreTrainedModel

from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import MAX_LENGTH, batch, build, first_output, of_tokens, randomize

Inputs = dict[str, torch.Tensor]
HEADS = (*LAYER_CLASSES, "BertForSequenceClassification", "T5ForConditionalGeneration")
SIZES = [(1, 8), (5, 6), (2, 11)]
"""Rows and tokens, other than those of the example (3 and 8)."""
DIMENSIONS = {name: Dim(name, min=2, max=MAX_LENGTH) for name in ("length", "target")}
VARIANTS: dict[str, Any] = {
    "factorized_random": "factorized_random",
    "factorized_dense+salience": "factorized_dense+salience",
    "random+dot_product": "random+dot_product",
    "sparse_fixed": "sparse_fixed",
    "heads": SynthesizerConfig("random", heads=[0, 2]),
}


def patched(head: str, variant: str | SynthesizerConfig) -> PreTrainedModel:
    model = patch_model(build(head), variant)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, SynthesizerMixin):
            randomize(module.synthesizer)
    return model


def rows_of(head: str, rows: int, length: int) -> Inputs:
    """A batch of so many rows; images, sound and features keep their length."""
    one, other = (batch(head, length if "input_ids" in batch(head) else 8) for _ in range(2))
    return {name: torch.cat([one[name], other[name]])[:rows] for name in one}


def given(head: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The example, and which of its dimensions are dynamic."""
    inputs, rows = batch(head), Dim("rows", min=1, max=64)
    shapes: dict[str, Any] = {name: {0: rows} for name in inputs}
    for name in inputs:
        if name.endswith("input_ids") or (name == "attention_mask" and "input_ids" in inputs):
            shapes[name][1] = DIMENSIONS["target" if name.startswith("decoder") else "length"]
    if head.startswith("T5"):  # the model asks its argument, and not its config
        return {**inputs, "use_cache": False}, {**shapes, "use_cache": None}
    return dict(inputs), shapes


def assert_same(head: str, model: PreTrainedModel, exported: Any) -> None:
    for rows, length in SIZES:
        inputs = rows_of(head, rows, length)
        found = exported(inputs)
        with torch.no_grad():
            expected = first_output(model(**inputs))
        torch.testing.assert_close(of_tokens(found, inputs), of_tokens(expected, inputs), rtol=1e-4, atol=1e-4)


def assert_exports(head: str, variant: str | SynthesizerConfig) -> None:
    model = patched(head, variant)
    inputs, shapes = given(head)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    fixed = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
    with torch.no_grad():
        assert_same(head, model, lambda inputs: first_output(program(**inputs, **fixed)))


@pytest.mark.feature("torch.export", kinds=["tables"])
@pytest.mark.parametrize("head", HEADS)
def test_a_model_of_each_layer_class_is_exported_with_a_dynamic_batch(head: str) -> None:
    assert_exports(head, "random")


@pytest.mark.feature("torch.export", kinds=["tables"])
def test_factors_are_exported_where_rows_have_positions_of_their_own() -> None:
    assert_exports("LlamaForCausalLM", "factorized_random")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", ["LlamaForCausalLM", "T5ForConditionalGeneration", "OPTForCausalLM"])
def test_other_variants_are_exported_where_rows_have_positions_of_their_own(head: str, variant: str) -> None:
    assert_exports(head, VARIANTS[variant])


def assert_runs_as_onnx(head: str, variant: str | SynthesizerConfig, path: Path) -> None:
    import onnxruntime  # of the extra hf_synthesizer[export], as all that torch.onnx.export needs

    model = patched(head, variant)
    inputs, shapes = given(head)
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=["found"],
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path)
    assert all(isinstance(size, str) for size in (place.shape[0] for place in session.get_inputs()))

    def run(inputs: Inputs) -> torch.Tensor:
        return torch.from_numpy(session.run(["found"], {name: inputs[name].numpy() for name in names})[0])

    assert_same(head, model, run)


QUICK = {"LlamaForCausalLM": "factorized_random", "ModernBertForSequenceClassification": "random"}


@pytest.mark.feature("ONNX", kinds=["tables"])
@pytest.mark.parametrize("head", QUICK)
def test_onnxruntime_runs_another_batch(head: str, tmp_path: Path) -> None:
    assert_runs_as_onnx(head, QUICK[head], tmp_path / "model.onnx")


@pytest.mark.feature("ONNX", kinds=["tables"])
@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_onnxruntime_runs_another_batch_of_each_layer_class(head: str, tmp_path: Path) -> None:
    assert_runs_as_onnx(head, "random", tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "head", ["LlamaForCausalLM", "T5ForConditionalGeneration", "ModernBertForSequenceClassification"]
)
def test_onnxruntime_runs_another_batch_of_other_variants(head: str, variant: str, tmp_path: Path) -> None:
    assert_runs_as_onnx(head, VARIANTS[variant], tmp_path / "model.onnx")
