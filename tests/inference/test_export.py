"""torch.export, ONNX and int8 of patched models, checked against the model itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from hf_synthesizer import SynthesizerConfig, UnsupportedModelError, patch_model
from tests.helpers.models import MAX_LENGTH, RELATIVES, VARIANTS, batch, build, first_output, mask

HEAD = "BertForSequenceClassification"
SIZES = [(3, 8), (1, 5), (7, MAX_LENGTH), (2, 2)]
DYNAMIC = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=MAX_LENGTH)}


def inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(2, 64, (rows, length)),
        "attention_mask": mask(rows, length, "right"),
        "token_type_ids": torch.randint(2, (rows, length)),
    }


def logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).logits


def export(model: Any) -> ExportedProgram:
    given = inputs(3, 8)
    return torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, DYNAMIC))


SMALL = {name: {"bucket_size": 4} if "lsh" in name else {} for name in RELATIVES}
"""The relatives of sparse_strided with fewer keys than the sequences have, so that there is something to choose."""


def assert_exports(variant: str | SynthesizerConfig) -> None:
    model = patch_model(build(HEAD), variant)
    exported = export(model).module()
    for rows, length in SIZES:
        given = inputs(rows, length)
        torch.testing.assert_close(logits(exported, given), logits(model, given), rtol=1e-4, atol=1e-5)


@pytest.mark.feature("torch.export")
def test_torch_export_with_dynamic_batch_and_length(variant: str) -> None:
    assert_exports(variant)


@pytest.mark.feature("torch.export")
@pytest.mark.parametrize("name", RELATIVES)
def test_torch_export_of_variants_that_choose_keys(name: str) -> None:
    assert_exports(SynthesizerConfig(name, **SMALL[name]))


def test_an_exported_program_can_be_saved_and_refuses_longer_sequences(tmp_path: Path) -> None:
    model = patch_model(build(HEAD), {0: "random+dot_product", 1: "factorized_dense"})
    torch.export.save(export(model), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    given = inputs(4, 11)
    torch.testing.assert_close(logits(loaded, given), logits(model, given), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match="24"):
        logits(loaded, inputs(2, MAX_LENGTH + 1))


@pytest.mark.parametrize("variant", ["random", "dense+salience", "random+dot_product", "sparse_strided"])
@pytest.mark.parametrize("model_type", ["bert", "t5"])
def test_torch_export_of_a_layer_of_real_width_with_the_length_alone_dynamic(model_type: str, variant: str) -> None:
    """Nothing that compares sizes, to choose the faster way, may become a bound of the length."""
    if model_type == "bert":
        model: Any = BertModel(BertConfig(num_hidden_layers=1, vocab_size=64), add_pooling_layer=False)
    else:
        model = T5EncoderModel(T5Config(num_layers=1, vocab_size=64))
    longest = 512
    patch_model(model.eval(), variant, max_length=longest)
    length = {1: Dim("length", min=2, max=longest)}
    exported = torch.export.export(model, (), tokens(128), dynamic_shapes=dict.fromkeys(tokens(1), length)).module()
    with torch.no_grad():
        for count in (2, 7, longest):
            given = tokens(count)
            found, expected = (called(**given).last_hidden_state for called in (exported, model))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def tokens(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 64, (1, length)), "attention_mask": mask(1, length, "none")}


def assert_traces(variant: str | SynthesizerConfig) -> None:
    model = patch_model(build(HEAD), variant)
    model.config.return_dict = False
    first, second = (tuple(inputs(rows, length).values()) for rows, length in ((3, 8), (2, 5)))
    traced = torch.jit.trace(model, first, strict=False)
    with torch.no_grad():
        for given in (first, second):
            torch.testing.assert_close(traced(*given)[0], model(*given)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.feature("torch.jit.trace")
def test_torch_jit_trace(variant: str) -> None:
    assert_traces(variant)


@pytest.mark.feature("torch.jit.trace")
@pytest.mark.parametrize("name", RELATIVES)
def test_torch_jit_trace_of_variants_that_choose_keys(name: str) -> None:
    assert_traces(SynthesizerConfig(name, **SMALL[name]))


def onnx_matches_torch(variant: str | SynthesizerConfig, path: Path) -> None:
    import onnxruntime  # of the extra hf_synthesizer[export], as all that torch.onnx.export needs

    model = patch_model(build(HEAD), variant)
    given = inputs(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=given,
            dynamo=True,
            dynamic_shapes=dict.fromkeys(given, DYNAMIC),
            input_names=list(given),
            output_names=["logits"],
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path)
    for rows, length in SIZES:
        given = inputs(rows, length)
        [found] = session.run(["logits"], {name: tensor.numpy() for name, tensor in given.items()})
        torch.testing.assert_close(torch.from_numpy(found), logits(model, given), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception):  # noqa: B017  (onnxruntime's own, and no common base)
        session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs(1, MAX_LENGTH + 1).items()})


FAST = ("random", "dense+salience")


@pytest.mark.feature("ONNX")
@pytest.mark.parametrize("variant", FAST)
def test_onnx_with_dynamic_batch_and_length(tmp_path: Path, variant: str) -> None:
    onnx_matches_torch(variant, tmp_path / "model.onnx")


@pytest.mark.feature("ONNX")
@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in FAST])
def test_onnx_of_the_other_variants(tmp_path: Path, variant: str) -> None:
    onnx_matches_torch(variant, tmp_path / "model.onnx")


@pytest.mark.feature("ONNX")
@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_onnx_of_variants_that_choose_keys(tmp_path: Path, name: str) -> None:
    onnx_matches_torch(SynthesizerConfig(name, **SMALL[name]), tmp_path / "model.onnx")


def quantize_with_torch(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will take its place
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.feature("int8 of the linear layers")
@pytest.mark.parametrize("head", [HEAD, "T5ForConditionalGeneration"])
def test_dynamic_int8_of_the_remaining_linears(variant: str, head: str) -> None:
    model, given = patch_model(build(head), variant), batch(head)
    with torch.no_grad():
        expected = first_output(model(**given))
        linears = sum(type(module) is nn.Linear for module in model.modules())
        quantized = quantize_with_torch(model)
        found = first_output(quantized(**given))
    left = sum(type(module) is nn.Linear and type(module.weight) is nn.Parameter for module in quantized.modules())
    assert left == 0 < linears and type(quantized) is type(model)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


def test_a_quantized_model_is_not_saved(tmp_path: Path) -> None:
    quantized = quantize_with_torch(patch_model(build(HEAD), "dense"))
    with pytest.raises(UnsupportedModelError, match="quantized.*Save it before"):
        quantized.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
