"""Caches that stop growing: heads with a window keep their last tokens and the first ones, logits by distance merge the others.

Every way to decode equals one pass without a cache.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from hf_synthesizer import SynthesizerConfig, UnsupportedModelError, patch_model
from hf_synthesizer.layers.caching import KeptLayer, bytes_of, dropping, kept
from hf_synthesizer.measuring.costs import cost_report
from tests.helpers.models import build, mask, read_by_encoder
from tests.layers.test_decoding import STRATEGIES, generate
from tests.synthesizers.test_laws import randomize_synthesizers

LENGTH = 256
MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertLMHeadModel", "T5ForConditionalGeneration")
PLANS = ("window", "values", "groups", "shared", "distances", "rows", "distances beside windows")
MERGING = ("distances", "rows", "distances beside windows")
"""Plans that merge tokens. T5 adds its own bias to logits by distance, and `eager` returns all weights: there nothing is merged."""


def plan(name: str, heads: int) -> Any:
    """A configuration of a layer with this number of heads."""
    half = heads // 2
    first, second, third = [*range(half)], [*range(half, heads - 1)], [heads - 1]
    made = SynthesizerConfig
    if name == "window":
        return made("dot_product", window=5, sinks=2)
    if name == "values":
        return made("random+salience", window=5, sinks=2, max_length=LENGTH)
    if name == "groups":  # the last head keeps the stock attention
        return [
            made("dot_product", window=5, sinks=2, heads=first),
            made("relative+salience", window=9, sinks=1, max_distance=3, heads=second),
        ]
    if name == "shared":  # no head sees everything, and Llama's groups of heads share keys
        return [
            made("dot_product", window=5, sinks=2, heads=first),
            made("dense", window=3, sinks=0, max_length=LENGTH, heads=second),
            made("relative", window=9, sinks=4, heads=third),
        ]
    if name == "distances":
        return made("relative+salience", max_distance=6, sinks=2)
    if name == "rows":
        return made("relative_dense+salience", max_distance=6, sinks=0)
    return [
        made("relative+salience", max_distance=6, sinks=3, heads=first),
        made("dot_product", window=4, sinks=1, heads=[*second, *third]),
    ]


def patched(head: str, name: str) -> Any:
    sizes = {"n_positions": LENGTH} if head[:2] in ("T5", "GP") else {"max_position_embeddings": LENGTH}
    model = build(head, **sizes)
    heads = getattr(model.config, "num_attention_heads", getattr(model.config, "num_heads", 0))
    layers = {"decoder": plan(name, heads)} if head.startswith("T5") else dict.fromkeys((0, 1), plan(name, heads))
    model = patch_model(model, layers)
    randomize_synthesizers(model)
    return model


def in_turn(others: Sequence[str], heads: Sequence[str] = MODELS) -> list[tuple[str, str, str]]:
    """Each plan with each model, and `others` in turn."""
    return [
        (head, name, others[(row + column) % len(others)])
        for row, head in enumerate(heads)
        for column, name in enumerate(PLANS)
    ]


@pytest.fixture
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are dropped early and often, so that short sequences show it."""
    for name, number in (("ROLLBACK", 3), ("SLACK", 2)):
        monkeypatch.setattr(dropping, name, number)
        monkeypatch.setattr(kept, name, number)


def self_attention(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def given(head: str, ids: torch.Tensor) -> dict[str, Any]:
    encoder = read_by_encoder(head, len(ids), 4)
    return {**encoder, "decoder_input_ids" if encoder else "input_ids": ids}


@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("head, name, backend", in_turn(["sdpa", "eager", "sdpa"]))
def test_chunks_and_steps_equal_one_pass(head: str, name: str, backend: str) -> None:
    model, ids = patched(head, name), torch.randint(2, 64, (2, 45))
    model.set_attn_implementation(backend)
    names = given(head, ids)
    with torch.no_grad():
        whole = model(**names, use_cache=False).logits
        cache, begin, sizes = None, 0, []
        for length in (20, 1, 1, 1, 1, 1, 1, 7, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1):
            chunk = {**names, **{key: ids[:, begin : begin + length] for key in names if key.endswith("input_ids")}}
            if head.startswith("T5"):
                chunk["input_ids"] = names["input_ids"]
            out = model(**chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            torch.testing.assert_close(out.logits, whole[:, begin : begin + length], rtol=1e-4, atol=1e-5)
            begin += length
            assert cache.get_seq_length() == begin
            sizes.append([layer.nbytes for layer in self_attention(cache).layers if isinstance(layer, KeptLayer)])
    keeps_all = name in MERGING and (backend == "eager" or head.startswith("T5"))
    if keeps_all and name != MERGING[-1]:
        assert not sizes[-1]
    else:
        assert len(sizes[-1]) == 2
        if name != "groups" and not keeps_all:
            assert max(sizes[-1]) <= 1.5 * max(sizes[0])


@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("head, name, strategy", in_turn([*STRATEGIES, "assisted", "lookup"]))
def test_generation_equals_that_without_a_cache(
    head: str, name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(head, name)
    ids = read_by_encoder(head, 1, 20).get("input_ids", torch.randint(2, 64, (1, 20)))
    if strategy == "assisted":
        assistant = patched(head, "window")
        settings = {"do_sample": False, "assistant_model": assistant}
        monkeypatch.setattr(dropping, "ROLLBACK", 24)  # an assistant drafts 20 tokens, and more after a success
        monkeypatch.setattr(kept, "ROLLBACK", 24)
    else:
        settings = STRATEGIES.get(strategy, {"do_sample": False, "prompt_lookup_num_tokens": 3})
    length = {"max_new_tokens": 36, "min_new_tokens": 36, "pad_token_id": 0}

    def made(**more: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return model.generate(ids, **length, **more)

    expected = made(use_cache=False, **(STRATEGIES.get(strategy, {"do_sample": False})))
    assert torch.equal(made(**settings), expected)
    if strategy == "greedy":
        assert torch.equal(made(cache_implementation="static", **settings), expected)


@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("name", PLANS)
def test_rows_padded_on_the_left(name: str) -> None:
    head = ("LlamaForCausalLM", "GPT2LMHeadModel")[PLANS.index(name) % 2]
    model, ids, keep = patched(head, name), torch.randint(2, 64, (3, 12)), mask(3, 12, "left")
    keep[1, :5] = 0
    settings = {"do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=keep, **settings)
    for row in range(3):
        own = ids[row : row + 1, int((1 - keep[row]).sum()) :]
        assert torch.equal(together[row, -30:], model.generate(own, use_cache=False, **settings)[0, -30:])
    beams = {"num_beams": 3, **settings}
    expected = model.generate(ids, attention_mask=keep, use_cache=False, **beams)
    assert torch.equal(model.generate(ids, attention_mask=keep, **beams), expected)


@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("name", PLANS)
def test_prompts_in_chunks_and_caches_of_users(name: str) -> None:
    model, ids = patched("LlamaForCausalLM", name), torch.randint(2, 64, (2, 30))
    expected = generate(model, ids, do_sample=False, use_cache=False)
    assert torch.equal(generate(model, ids, do_sample=False, prefill_chunk_size=7), expected)
    for cache in (
        DynamicCache(),
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=40),
    ):
        assert torch.equal(generate(model, ids, do_sample=False, past_key_values=cache), expected)
        assert isinstance(cache.layers[0], KeptLayer) != isinstance(cache, StaticCache)


@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("name", PLANS)
def test_a_cache_is_cropped_saved_offloaded_reset_and_continued(name: str) -> None:
    head = ("BertLMHeadModel", "LlamaForCausalLM")[PLANS.index(name) % 2]
    model, ids = patched(head, name), torch.randint(2, 64, (2, 40))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits

        def step(cache: Cache, begin: int, end: int, rows: Any = slice(None)) -> None:
            out = model(input_ids=ids[rows, begin:end], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(out.logits, whole[rows, begin:end], rtol=1e-4, atol=1e-5)

        cache = DynamicCache()
        step(cache, 0, 25)
        cache.crop(-3)
        assert cache.get_seq_length() == 22
        step(cache, 22, 24)
        for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
            step(other, 24, 30)
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        step(cache, 24, 31)
        one = copy.deepcopy(cache)
        one.batch_select_indices(torch.tensor([1]))
        step(one, 31, 32, slice(1, 2))
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([1, 0]))
        assert one.get_seq_length() == 32
        with pytest.raises(UnsupportedModelError, match="asked to take back 20 of 31 tokens.*num_assistant_tokens"):
            cache.crop(-20)
        step(cache, 31, 40)
        cache.reset()
        assert cache.get_seq_length() == 0
        step(cache, 0, 20)
        step(cache, 20, 40)


@pytest.mark.usefixtures("little_slack")
@torch.no_grad()
def test_a_cache_that_dropped_tokens_is_refused_by_layers_that_need_them() -> None:
    model, ids = patched("LlamaForCausalLM", "window"), torch.randint(2, 64, (2, 30))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedModelError, match="new DynamicCache"):
        build("LlamaForCausalLM")(input_ids=ids[:, :1], past_key_values=copy.deepcopy(cache))
    with pytest.raises(UnsupportedModelError, match="other windows.*new DynamicCache"):
        patched("LlamaForCausalLM", "shared")(input_ids=ids[:, :1], past_key_values=cache)
    model = patched("LlamaForCausalLM", "distances")
    cache = model(input_ids=ids, use_cache=True).past_key_values
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="output_attentions"):
        model(input_ids=ids[:, :1], past_key_values=cache)


@pytest.mark.usefixtures("little_slack")
def test_weights_of_a_window_are_those_of_all_tokens() -> None:
    model, ids = patched("LlamaForCausalLM", "groups"), torch.randint(2, 64, (2, 30))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        cache = model(input_ids=ids[:, :28], use_cache=True).past_key_values
        step = model(input_ids=ids[:, 28:], past_key_values=cache, output_attentions=True).attentions
    for expected, found in zip(whole, step, strict=True):
        torch.testing.assert_close(found, expected[:, :, 28:], rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["groups", "distances beside windows"])
def test_a_report_of_costs_counts_what_is_kept(name: str, backend: str) -> None:
    model = patched("LlamaForCausalLM", name)
    model.set_attn_implementation(backend)
    costs = cost_report(model, [100, LENGTH]).costs
    for cost in costs:
        cache = model(torch.randint(2, 64, (1, cost.length)), use_cache=True).past_key_values
        assert cost.cache_bytes == sum(map(bytes_of, cache.layers))
    assert costs[1].cache_bytes < 0.8 * costs[1].stock_cache_bytes


@pytest.mark.parametrize("name", ["window", "distances beside windows"])
def test_a_long_text_needs_no_more_than_a_short_one(name: str) -> None:
    model, ids = patched("LlamaForCausalLM", name), torch.randint(2, 64, (1, 20))
    settings = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    sizes = []
    for length in (150, 200, 230):
        out = model.generate(ids, max_new_tokens=length, min_new_tokens=length, **settings)
        sizes.append(sum(layer.nbytes for layer in out.past_key_values.layers))
    stock = build("LlamaForCausalLM", max_position_embeddings=LENGTH)
    of_token = sum(2 * layer.keys[..., :1, :].nbytes for layer in stock(ids).past_key_values.layers)
    assert max(sizes) <= (kept.ROLLBACK + kept.SLACK + 5 + 3) * of_token
    whole = model(input_ids=out.sequences, use_cache=False).logits[0, 19:-1].argmax(-1)
    assert (out.sequences[0, 20:] == whole).float().mean() > 0.99


@torch.no_grad()
@pytest.mark.usefixtures("little_slack")
@pytest.mark.parametrize("head, name, counted", in_turn(["visible", "all"], ["LlamaForCausalLM", "BertLMHeadModel"]))
def test_hidden_tokens_between_visible_ones(head: str, name: str, counted: str) -> None:
    """position_ids may count them or not: a window reaches over them, or does not."""
    model, ids = patched(head, name), torch.randint(2, 64, (3, 45))
    keep = torch.ones(3, 45, dtype=torch.long)
    keep[0, 0] = keep[1, :7] = keep[2, :2] = keep[2, 10:19] = 0
    places = (keep.cumsum(-1) - 1).clamp(min=0) if counted == "visible" else torch.arange(45).expand(3, -1)
    whole = model(input_ids=ids, attention_mask=keep, position_ids=places, use_cache=False).logits
    cache, begin = DynamicCache(), 0
    for length in (24, 1, 1, 1, 5, *[1] * 13):
        end = begin + length
        now = {"input_ids": ids[:, begin:end], "position_ids": places[:, begin:end]}
        found = model(**now, attention_mask=keep[:, :end], past_key_values=cache).logits
        shown = keep[:, begin:end].bool()
        torch.testing.assert_close(found[shown], whole[:, begin:end][shown], rtol=1e-4, atol=3e-5)
        begin = end
    assert all(isinstance(layer, KeptLayer) for layer in cache.layers)
