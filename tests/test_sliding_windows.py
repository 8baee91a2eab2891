"""Models whose layers see a window of the past: their caches drop what lies behind it, and positions go on."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_synthesizer import patch_model
from tests.models import mask, randomize

WINDOW, LENGTH, NEW = 4, 7, 6


def gemma(variant: str, **options: str) -> Gemma2ForCausalLM:
    """Every other layer has a window; groups of two heads share their values."""
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=32,
        max_position_embeddings=24,
        sliding_window=WINDOW,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = patch_model(Gemma2ForCausalLM(config), variant, **options)
    for layer in model.model.layers:
        randomize(layer.self_attn.synthesizer)
    return model.eval()


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["random", "random+salience", "dense", "random+dot_product", "dot_product"])
def test_generation_beyond_the_window_is_the_same_with_and_without_a_cache(
    variant: str, cache: str, padding: str
) -> None:
    model = gemma(variant)
    inputs = {"input_ids": torch.randint(1, 50, (3, LENGTH)), "attention_mask": mask(3, LENGTH, padding)}
    settings = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(**inputs, use_cache=False, **settings)
    found = model.generate(**inputs, cache_implementation=cache, **settings)
    assert torch.equal(expected.sequences, found.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
