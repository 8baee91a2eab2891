"""Checkpoints loaded in half precision, where Transformers keeps some modules in float32 by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_synthesizer import patch_model
from tests.helpers.models import CHOOSING, batch, build, first_output

T5 = "T5ForConditionalGeneration"


def saved(folder: Path, head: str, variant: str):
    model = patch_model(build(head, **({"initializer_range": 0.1} if head[0] == "B" else {})), variant)
    model.save_pretrained(folder)
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


def test_t5_in_float16(tmp_path: Path, variant: str) -> None:
    model, inputs = saved(tmp_path, T5, variant), batch(T5)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    with torch.no_grad():
        found = first_output(loaded(**inputs))
        assert found.dtype == torch.float16
        assert_close(found, first_output(model(**inputs)))
    for cache in ("dynamic", "static"):
        loaded.generate(inputs["input_ids"], max_new_tokens=3, cache_implementation=cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bert_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    model, inputs = saved(tmp_path, "BertModel", "dense+salience"), batch("BertModel")
    with torch.no_grad():
        found = first_output(type(model).from_pretrained(tmp_path, dtype=dtype)(**inputs))
        assert_close(found, first_output(model(**inputs)))


@pytest.mark.parametrize("name", ["synthesizer", "worth", "table", "columns", "hidden", "query", "parts"])
@pytest.mark.parametrize("variant", ["random+salience", "dense+dot_product", "sparse_strided"])
def test_names_that_a_model_keeps_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, name: str
) -> None:
    model, inputs = saved(tmp_path, "T5EncoderModel", variant), batch("T5EncoderModel")
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules", ["wo", name])
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    with torch.no_grad():
        assert_close(first_output(loaded(**inputs)), first_output(model(**inputs)))


@pytest.mark.parametrize("variant", ["random+salience", "dense", "factorized_dense", "dot_product", *CHOOSING[-1:]])
def test_projections_that_stay_in_float32(variant: str) -> None:
    """As in a composite model, which is loaded by a class that is not ours."""
    model, inputs = patch_model(build("T5EncoderModel"), variant), batch("T5EncoderModel")
    with torch.no_grad():
        expected = first_output(model(**inputs))
        model.half()
        for name, module in model.named_modules():
            if ".synthesizer." in name and isinstance(module, torch.nn.Linear):
                module.float()
        assert_close(first_output(model(**inputs)), expected)
