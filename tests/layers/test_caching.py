"""Caches of Transformers: of any capacity, laid out early, with a window; paged and unknown ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache, EncoderDecoderCache, MistralConfig, MistralForCausalLM, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from hf_synthesizer import SequenceTooLongError, UnsupportedModelError, patch_model
from hf_synthesizer.layers.caching import extend
from tests.helpers.models import bert_config, build, mask
from tests.layers.test_decoding import HEADS, generate, patched
from tests.synthesizers.test_laws import randomize_synthesizers


@pytest.mark.parametrize("head", HEADS)
def test_a_request_that_is_too_long_for_a_static_cache_leaves_the_next_one_alone(variant: str, head: str) -> None:
    """Transformers keeps the capacity of the longest request; what counts are the tokens."""
    model = patch_model(build(head), variant, max_length=14)
    randomize_synthesizers(model)
    ids, keep = torch.randint(2, 64, (3, 5)), mask(3, 5, "left")
    expected = [generate(model, ids, do_sample=False, use_cache=False, attention_mask=m) for m in (None, keep)]
    model.generation_config.max_length = (
        23  # the model's own setting, which no caller asks for, is not refused at the start
    )
    with pytest.raises(SequenceTooLongError, match="N = max_length = 14"):
        model.generate(ids, min_new_tokens=18, cache_implementation="static", pad_token_id=0)
    model.generation_config.max_length = None
    for attention_mask, tokens in zip((None, keep), expected, strict=True):
        made = generate(model, ids, do_sample=False, cache_implementation="static", attention_mask=attention_mask)
        assert model._previous_max_cache_length > 14
        assert torch.equal(made, tokens)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_static_cache_with_more_room_than_the_longest_sequence(variant: str, backend: str, length: int) -> None:
    model = patch_model(build("BertLMHeadModel"), variant, max_length=10)
    randomize_synthesizers(model)
    model.set_attn_implementation(backend)
    ids = torch.randint(2, 64, (2, 10))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=30)
        for start, end in ((0, length), (length, 9), (9, 10)):
            out = model(input_ids=ids[:, start:end], past_key_values=cache, output_attentions=backend == "eager")
            torch.testing.assert_close(out.logits, whole[:, start:end], rtol=1e-4, atol=1e-4)
        if backend == "eager":
            assert out.attentions[0].shape == (2, 3, 1, 30)
        with pytest.raises(SequenceTooLongError, match="L = 11"):
            model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_t5_hybrid_shares_its_position_bias_in_a_long_static_cache() -> None:
    model, ids = (
        patch_model(build("T5ForConditionalGeneration"), {"decoder.0": "random"}, max_length=10),
        torch.randint(2, 64, (2, 5)),
    )
    expected = generate(model, ids, do_sample=False, use_cache=False)
    cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=n) for n in (30, 5)))
    assert torch.equal(generate(model, ids, do_sample=False, past_key_values=cache), expected)


def test_left_padding_takes_no_positions() -> None:
    """A row of 10 tokens behind 3 pads has 13 indices, and the positions 0 to 9."""
    model = patch_model(build("BertLMHeadModel"), "random", max_length=10)
    ids = torch.randint(2, 64, (1, 13))
    keep = torch.ones(1, 13, dtype=torch.long)
    keep[:, :3] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=keep, position_ids=(keep.cumsum(-1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(padded[:, 3:], model(input_ids=ids[:, 3:]).logits, rtol=1e-4, atol=1e-4)


def test_a_compiled_step_checks_the_length_when_it_runs() -> None:
    torch._dynamo.reset()
    model = patch_model(build("BertLMHeadModel", num_hidden_layers=1), "dense", max_length=10)
    randomize_synthesizers(model)
    ids = torch.randint(2, 64, (2, 10))
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=30)
        model(input_ids=ids[:, :8], past_key_values=cache)
        for place in (8, 9):
            at = torch.full((2, 1), place)
            keep = torch.ones(2, place + 1, dtype=torch.long)
            out = step(
                input_ids=ids[:, place : place + 1], past_key_values=cache, position_ids=at, attention_mask=keep
            )
            torch.testing.assert_close(out.logits[:, 0], whole[:, place], rtol=1e-4, atol=1e-4)
        with pytest.raises((RuntimeError, IndexError, SequenceTooLongError)):
            step(
                input_ids=ids[:, :1],
                past_key_values=cache,
                position_ids=torch.full((2, 1), 10),
                attention_mask=torch.ones(2, 11, dtype=torch.long),
            )


def test_prefill_in_chunks(variant: str) -> None:
    """Transformers then lays the static cache out for stock keys, before the first token."""
    model, ids = patched("BertLMHeadModel", variant), torch.randint(2, 64, (2, 9))
    uncached = generate(model, ids, do_sample=False, use_cache=False)
    settings = {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 4}
    if max(layer.synthesizer.key_width for layer in model.modules() if hasattr(layer, "synthesizer")) > 8:
        with pytest.raises(UnsupportedModelError, match="keys of width 8, but this layer keeps 9.*prefill_chunk_size"):
            generate(model, ids, **settings)
    else:
        assert torch.equal(generate(model, ids, **settings), uncached)


@pytest.mark.parametrize("variant", ["random", "random+salience", "dense+dot_product"])
@pytest.mark.parametrize("head", HEADS)
def test_a_static_cache_that_was_laid_out_early(variant: str, head: str) -> None:
    model, ids = patched(head, variant), torch.randint(2, 64, (2, 5))
    width = 8 if head == HEADS[0] else 6
    cache = StaticCache(config=model.config, max_cache_len=20)
    cache.early_initialization(2, 3, width, torch.float32, torch.device("cpu"))
    if head == HEADS[1]:
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=5))
    made = generate(model, ids, do_sample=False, past_key_values=cache)
    assert torch.equal(made, generate(model, ids, do_sample=False, use_cache=False))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("head", HEADS)
def test_continuous_batching_is_refused(head: str, backend: str) -> None:
    model = patched(head, "random")
    model.set_attn_implementation(backend)
    with pytest.raises(UnsupportedModelError, match="continuous batching.*Call model.generate"):
        model.generate_batch([[3, 4, 5], [6, 7, 8, 9]], max_new_tokens=3)
    assert model.config._attn_implementation == backend
    generate(model, torch.tensor([[3, 4, 5]]))


class Paged:
    """Stands in for a cache that a later version of Transformers may pass."""

    def update(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["cache", "paged_kv_cache", "past_key_value"])
@pytest.mark.parametrize("head", ["BertLMHeadModel", "BertModel", "T5ForConditionalGeneration"])
def test_a_cache_under_another_name_is_refused(head: str, name: str) -> None:
    model = patch_model(build(head), "random")
    inputs = {"input_ids": torch.tensor([[3, 4]])}
    inputs |= {"decoder_input_ids": torch.tensor([[3, 4]])} if head.startswith("T5") else {}
    with pytest.raises(UnsupportedModelError, match=f"A Paged was passed as '{name}'"):
        model(**inputs, **{name: Paged()})


@pytest.mark.parametrize("head", ["BertModel", "T5EncoderModel"])
def test_an_argument_that_means_other_attention(head: str) -> None:
    stock, ids = build(head), torch.tensor([[3, 4, 5]])
    expected, causal = stock(ids)[0], stock(ids, is_causal=True)[0]
    model = patch_model(stock, "dot_product")
    torch.testing.assert_close(model(ids, is_causal=True)[0], causal)
    harmless = {
        "is_causal": False,
        "num_items_in_batch": torch.tensor(2),
        "head_mask": None,
        "special_tokens_mask": ids,
    }
    torch.testing.assert_close(model(ids, **harmless)[0], expected)
    for arguments in ({"head_mask": torch.ones(3)}, {"softcap": 3.0}, {"s_aux": torch.ones(3)}):
        with pytest.raises(UnsupportedModelError, match=f"argument {next(iter(arguments))}=.*Leave it out"):
            model(ids, **arguments)


class Unknown(CacheLayerMixin):
    lazy_initialization = update = get_mask_sizes = get_seq_length = get_max_length = None


@pytest.mark.parametrize(
    "cache",
    [
        Cache(layers=[Unknown(), Unknown()]),
        Cache(layer_class_to_replicate=Unknown),
        ((torch.zeros(1, 3, 2, 8),) * 2,) * 2,
    ],
    ids=["unknown", "unknown to come", "tuple"],
)
def test_a_cache_of_an_unknown_kind_is_refused(cache) -> None:
    layer = patched("BertLMHeadModel", "random").bert.encoder.layer[0].attention.self
    with pytest.raises(UnsupportedModelError, match="know the caches of Transformers that keep tokens in their order"):
        layer(torch.randn(1, 2, 24), past_key_values=cache)


def mistral(variant: str, window: int | None) -> Any:
    """A tiny decoder with two heads a value, and a window."""
    config = MistralConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        sliding_window=window,
        initializer_range=0.3,
    )
    model = patch_model(MistralForCausalLM(config).eval(), variant)
    randomize_synthesizers(model)
    return model


@pytest.mark.parametrize("window", [6, None])
@pytest.mark.parametrize("variant", ["random", "dense+salience", "factorized_dense", "random+dot_product"])
def test_a_cache_that_drops_what_lies_behind_a_window(variant: str, window: int | None) -> None:
    model, ids = mistral(variant, window), torch.randint(2, 64, (2, 5))
    expected = generate(model, ids, do_sample=False, use_cache=False)
    assert torch.equal(generate(model, ids, do_sample=False), expected)
    assert torch.equal(generate(model, ids, do_sample=False, cache_implementation="static"), expected)
    cache = model(input_ids=expected, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[-2] == (5 if window else 13)


def test_a_layer_that_counts_its_cache_refuses_one_that_drops_tokens() -> None:
    layer = patched("BertLMHeadModel", "random").bert.encoder.layer[0].attention.self
    cache = Cache(layers=[DynamicSlidingWindowLayer(4)])
    layer(torch.randn(1, 3, 24), past_key_values=cache)
    layer(torch.randn(1, 1, 24), past_key_values=cache)
    with pytest.raises(UnsupportedModelError, match="keeps 4 of 5 tokens.*no position_ids"):
        layer(torch.randn(1, 1, 24), past_key_values=cache)


@pytest.mark.parametrize("heads", [6, 3, 1])
def test_key_states_of_more_heads_than_values_have(heads: int) -> None:
    """A static cache asks for as many heads of keys as of values."""
    states, value = torch.randn(2, 6, 5, 2), torch.randn(2, heads, 5, 4)
    cache = StaticCache(config=bert_config(), max_cache_len=9)
    extend(cache, 0, states[..., :4, :], value[..., :4, :])
    made, values, before = extend(cache, 0, states[..., 4:, :], value[..., 4:, :])
    assert int(before) == 4
    assert torch.equal(made[..., :5, :], states) and torch.equal(values[..., :5, :], value)
