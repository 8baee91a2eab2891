"""torch.compile of models that nobody has called before, and that are as deep as real ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import batch, build, first_output
from tests.synthesizers.test_laws import randomize_synthesizers

DEEP = {"num_hidden_layers": 12}
HEADS: dict[str, Any] = {
    "tables": [SynthesizerConfig("random+salience", heads=[0]), SynthesizerConfig("factorized_random", heads=[2])],
    "rows": [SynthesizerConfig("dense", heads=[0]), SynthesizerConfig("factorized_dense", heads=[1])],
    "patterns": [SynthesizerConfig("sparse_strided", heads=[1], stride=2)],
}
KEPT_FORWARDS: dict[str, Any] = {
    "dot_product+salience": "dot_product+salience",
    "heads": [SynthesizerConfig("dense+salience", heads=[2, 3])],
}


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def twice(spec: Any, head: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two equal models of twelve layers: one to compile, which nobody has called, and one to hold it against."""
    model = patch_model(build(head, **DEEP), spec)
    randomize_synthesizers(model)
    return model, copy.deepcopy(model)


@pytest.mark.feature("torch.compile in one graph", kinds=["heads"])
@pytest.mark.parametrize("spec", HEADS)
def test_a_model_whose_heads_differ_is_compiled_before_its_first_call(spec: str) -> None:
    head = "BertForSequenceClassification"
    model, reference = twice(HEADS[spec], head)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    given = batch(head)
    with torch.no_grad():
        found = first_output(compiled(**given))
        assert counter.frame_count == 1
        torch.testing.assert_close(found, first_output(reference(**given)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spec", "kind"), zip(KEPT_FORWARDS, ["dynamic", "static"], strict=True))
def test_decoding_is_compiled_where_the_stock_forward_is_kept(spec: str, kind: str) -> None:
    model, reference = twice(KEPT_FORWARDS[spec], "LlamaForCausalLM")
    ids = torch.randint(2, 64, (2, 8))
    compiled = torch.compile(model, backend="eager", fullgraph=kind == "static")
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=16) if kind == "static" else DynamicCache()
        found = [
            compiled(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split([7, 1], 1)
        ]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)
