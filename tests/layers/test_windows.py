"""The option `window` in whole models: what a head sees, in layers of our own forward and in those that keep the stock forward."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import build

LENGTH, WINDOW, SINKS = 20, 5, 2
MODELS = {"BertModel": False, "LlamaForCausalLM": True}
"""Whether each model is causal. Layers of Llama keep the stock forward for dot products."""


def seen(causal: bool) -> torch.Tensor:
    """(L, L), from the definition: near keys, the first tokens, and in a causal model no later ones."""
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    near = ((query - key).abs() < WINDOW) | (key < SINKS)
    return near & (key <= query) if causal else near


@pytest.mark.parametrize("name", MODELS)
def test_dot_product_with_a_window_is_stock_under_a_mask(name: str) -> None:
    torch.manual_seed(0)
    stock = build(name).eval()
    stock.set_attn_implementation("sdpa")
    patched = patch_model(copy.deepcopy(stock), "dot_product", window=WINDOW, sinks=SINKS)
    tokens = torch.randint(4, 20, (2, LENGTH))
    with torch.no_grad():
        expected = stock(tokens, attention_mask=seen(MODELS[name])[None, None].expand(2, 1, -1, -1))[0]
        assert torch.allclose(patched(tokens)[0], expected, atol=1e-5)
        assert not torch.allclose(stock(tokens)[0], expected, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_recorded_weights_of_groups_of_heads_end_at_their_windows(name: str) -> None:
    torch.manual_seed(0)
    model = build(name).eval()
    heads = model.config.num_attention_heads
    windowed = SynthesizerConfig("dot_product", heads=range(heads // 2), window=WINDOW, sinks=SINKS)
    patch_model(model, {0: [windowed]})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.randint(4, 20, (1, LENGTH)), output_attentions=True).attentions[0][0]
    assert torch.equal(weights[0] > 0, seen(MODELS[name]))
    assert (weights[-1] > 0).sum() > seen(MODELS[name]).sum()
