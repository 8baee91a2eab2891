"""Models whose layers see a window of the past: their caches drop what lies behind it, and positions go on."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import mask, randomize

WINDOW, LENGTH, NEW = 4, 7, 6


def gemma(variant: str | SynthesizerConfig, **options: str) -> Gemma2ForCausalLM:
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


PATTERNS = {
    "sparse_fixed": "sparse_fixed",
    "sparse_fixed of stride 3": SynthesizerConfig("sparse_fixed", stride=3),
    "a head of sparse_fixed": SynthesizerConfig("sparse_fixed", heads=[1]),
    "sparse_strided": "sparse_strided",
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_positions_goes_on_beyond_the_window(pattern: str, padding: str) -> None:
    """Blocks are counted from the row's first token, which the window hides by and by."""
    model = gemma(PATTERNS[pattern])
    inputs = {"input_ids": torch.randint(1, 50, (3, LENGTH)), "attention_mask": mask(3, LENGTH, padding)}
    settings = dict(max_new_tokens=NEW + 4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(**inputs, use_cache=False, **settings)
    caches = {}, {"cache_implementation": "static"}, {"past_key_values": DynamicCache()}, {"prefill_chunk_size": 2}
    for cache in caches:
        found = model.generate(**inputs, **cache, **settings)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_assisted_decoding_with_a_pattern_of_positions_beyond_the_window() -> None:
    model, assistant = gemma("sparse_fixed"), gemma("random")
    ids, settings = torch.randint(1, 50, (1, LENGTH)), dict(max_new_tokens=NEW + 4, do_sample=False)
    expected = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **settings), expected)


@pytest.mark.parametrize("explicit", [False, True], ids=["all tokens", "visible tokens"])
@pytest.mark.parametrize("variant", ["random", "random+dot_product", "sparse_fixed"])
def test_steps_behind_a_gap_and_beyond_the_window_are_those_of_one_pass(variant: str, explicit: bool) -> None:
    model, ids, keep = gemma(variant), torch.randint(1, 50, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    keep[0, 4:6] = 0
    keep[1, 9] = 0
    positions = (keep.cumsum(-1) - 1) if explicit else torch.arange(14).expand(2, -1)
    with torch.no_grad():
        whole = model(ids, attention_mask=keep, position_ids=positions, use_cache=False).logits
        output, parts = None, []
        for start, end in [(0, 6), (6, 9), *((i, i + 1) for i in range(9, 14))]:
            past = None if output is None else output.past_key_values
            given = {"position_ids": positions[:, start:end]} if explicit else {}
            output = model(
                ids[:, start:end], attention_mask=keep[:, :end], past_key_values=past, use_cache=True, **given
            )
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[keep.bool()], whole[keep.bool()], rtol=1e-4, atol=1e-4)
