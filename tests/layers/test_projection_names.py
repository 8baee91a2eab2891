"""An attention class whose projections have new names needs one line in `finding/projections.py`, and no other change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_synthesizer import patch_model
from hf_synthesizer.layers.finding import projections
from hf_synthesizer.layers.finding.layer_classes import find_layer_class
from hf_synthesizer.layers.guard import Guard
from hf_synthesizer.layers.signatures.rotary import RotaryDecoderLayer
from hf_synthesizer.layers.stock_forward import StockForwardLayer
from tests.helpers.models import batch, build, first_output
from tests.layers.test_hidden_gates import written

LINE = ("query_maker", "key_maker", "value_maker", ("output_maker",))
NAMES, STOCK = (*LINE[:3], *LINE[3]), ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD = "LlamaForCausalLM"


class RenamedAttention(LlamaAttention):
    """Llama's attention with projections of other names."""

    forward = written(names=dict(zip(STOCK, NAMES, strict=True)))

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, stock in zip(NAMES, STOCK, strict=True):
            self._modules[name] = self._modules.pop(stock)


def stock() -> PreTrainedModel:
    torch.manual_seed(0)
    return build(HEAD)


def renamed() -> PreTrainedModel:
    model = stock()
    for index, layer in enumerate(model.model.layers):
        attention = RenamedAttention(model.config, index)
        weights = layer.self_attn.state_dict().values()
        attention.load_state_dict(dict(zip(attention.state_dict(), weights, strict=True)))
        layer.self_attn = attention.eval()
    return model


def run(model: PreTrainedModel) -> torch.Tensor:
    torch.manual_seed(2)
    with torch.no_grad():
        return first_output(model(**batch(HEAD)))


def patched(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    return patch_model(model, "random")


def test_without_the_line_the_stock_forward_is_kept() -> None:
    assert find_layer_class(RenamedAttention) is None
    assert torch.equal(run(renamed()), run(stock()))


def test_one_line_names_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "SEPARATE", (*projections.SEPARATE, LINE))
    assert find_layer_class(RenamedAttention) is RotaryDecoderLayer
    model, expected = (patched(model) for model in (renamed(), stock()))
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, RotaryDecoderLayer) and not isinstance(attention, StockForwardLayer)
    assert isinstance(attention.query_maker, Guard) and "key_maker" not in attention._modules
    assert torch.equal(run(model), run(expected))
