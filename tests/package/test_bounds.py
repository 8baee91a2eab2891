"""What the lowest versions of setup.cfg once lacked. Run with them too: the newest ones never failed here."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_synthesizer import SynthesizerBertModel, patch_model, unpatch_model
from hf_synthesizer.device.matmul import linear
from tests.helpers.models import build

HEADS = ["BertForSequenceClassification", "T5ForConditionalGeneration"]


@pytest.mark.parametrize("head", HEADS)
def test_a_patched_model_returns_its_hidden_states_and_attentions(head: str) -> None:
    from tests.helpers.models import batch

    model, inputs = build(head).eval(), batch(head, 8)
    asked = {"output_hidden_states": True, "output_attentions": True}
    model.set_attn_implementation("eager")
    stock = model(**inputs, **asked)
    patch_model(model, "random", max_length=8)
    for found in (model(**inputs, **asked), unpatch_model(model)(**inputs, **asked)):
        for name, states in stock.items():
            if name.endswith(("hidden_states", "attentions")):
                assert found[name] is not None and len(found[name]) == len(states), name


def test_a_patched_model_is_freed() -> None:
    model = patch_model(build("BertModel"), "random", max_length=8)
    model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_loaded_model_records_as_a_patched_one(tmp_path: Path) -> None:
    patch_model(build("BertModel"), "random", max_length=8).save_pretrained(tmp_path)
    loaded = SynthesizerBertModel.from_pretrained(tmp_path, attn_implementation="eager")
    found = loaded(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == len(found.attentions) + 1 == 3


def test_a_hook_on_all_modules_sees_a_projection() -> None:
    layer, rows = nn.Linear(512, 512), torch.randn(32, 512)  # large enough for oneDNN
    expected, seen = layer(rows), []
    torch.testing.assert_close(linear(layer, rows), expected)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        torch.testing.assert_close(linear(layer, rows), expected)
    finally:
        handle.remove()
    assert seen == [layer]
