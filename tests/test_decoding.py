"""Generation with a cache: the same tokens as without, values alone in the cache, padding without influence."""

from __future__ import annotations

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer

from hf_synthesizer import SequenceTooLongError, UnsupportedModelError, patch_model
from tests.models import CHOOSING, VARIANTS, build, decoder, mask
from tests.test_laws import randomize_synthesizers

FAMILIES = ("bert", "t5")
STRATEGIES = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True},
}


def patched(family: str, variant: str):
    model = patch_model(decoder(family), variant)
    randomize_synthesizers(model)
    return model


def generate(model, ids: torch.Tensor, **settings) -> torch.Tensor:
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_uncached(variant: str, family: str, strategy: str) -> None:
    model, ids = patched(family, variant), torch.randint(2, 64, (2, 5))
    settings = STRATEGIES[strategy]
    uncached = generate(model, ids, use_cache=False, **settings)
    assert torch.equal(generate(model, ids, **settings), uncached)
    assert torch.equal(generate(model, ids, cache_implementation="static", **settings), uncached)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_step_equal_those_of_the_whole_sequence(variant: str, family: str, backend: str) -> None:
    model = decoder(family)
    model.set_attn_implementation(backend)
    randomize_synthesizers(patch_model(model, variant))
    ids = torch.randint(2, 64, (2, 9))
    encoder = {} if family == "bert" else {"input_ids": torch.randint(2, 64, (2, 5))}
    name = "input_ids" if family == "bert" else "decoder_input_ids"
    with torch.no_grad():
        whole = model(**encoder, **{name: ids}, use_cache=False).logits
        cache = None
        for chunk in (ids[:, :4], ids[:, 4:5], ids[:, 5:8], ids[:, 8:]):
            out = model(**encoder, **{name: chunk}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            length = cache.get_seq_length()
            torch.testing.assert_close(out.logits, whole[:, length - chunk.shape[1] : length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batches_equal_one_by_one(variant: str, family: str, use_cache: bool) -> None:
    model, ids, keep = patched(family, variant), torch.randint(2, 64, (3, 6)), mask(3, 6, "left")
    together = generate(model, ids, attention_mask=keep, do_sample=False, use_cache=use_cache)
    for row in range(3):
        alone = generate(model, ids[row : row + 1, row:], do_sample=False, use_cache=use_cache)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.parametrize("variant", ["random", "dense", "factorized_dense+salience"])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batches_in_a_static_cache(variant: str, family: str) -> None:
    model, ids, keep = patched(family, variant), torch.randint(2, 64, (3, 6)), mask(3, 6, "left")
    settings = {"attention_mask": keep, "do_sample": False}
    static = generate(model, ids, cache_implementation="static", **settings)
    assert torch.equal(static, generate(model, ids, use_cache=False, **settings))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_synthesized_layer_caches_values_only(variant: str, family: str) -> None:
    model = patched(family, variant)
    width = max(1, model.base_model.get_submodule(attention_name(family)).synthesizer.key_width)
    with torch.no_grad():
        ids = torch.randint(2, 64, (2, 5))
        out = model(input_ids=ids, use_cache=True, **({} if family == "bert" else {"decoder_input_ids": ids}))
    cache = out.past_key_values
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    assert all(layer.keys.shape[-1] == width and layer.values.shape[-2] == 5 for layer in cache.layers)
    assert cache.get_seq_length() == 5
    if "dot_product" not in variant and variant not in CHOOSING:
        assert width == 1


def attention_name(family: str) -> str:
    return "encoder.layer.0.attention.self" if family == "bert" else "decoder.block.0.layer.0.SelfAttention"


def test_a_hybrid_mixes_stock_and_synthesized_caches() -> None:
    model = patch_model(decoder("bert"), {0: "random"})
    ids = torch.randint(2, 64, (2, 5))
    assert torch.equal(generate(model, ids, do_sample=False), generate(model, ids, do_sample=False, use_cache=False))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert [layer.keys.shape[-1] for layer in cache.layers] == [1, 8]


@pytest.mark.parametrize("variant", ["random", "dense+salience", "dense+dot_product"])
def test_a_decoder_with_cross_attention(variant: str) -> None:
    model = build("BertLMHeadModel", add_cross_attention=True)
    randomize_synthesizers(patch_model(model, variant))
    encoded, ids = torch.randn(2, 4, 24), torch.randint(2, 64, (2, 6))
    with torch.no_grad():
        whole = model(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).logits
        first = model(input_ids=ids[:, :5], encoder_hidden_states=encoded, use_cache=True)
        step = model(input_ids=ids[:, 5:], encoder_hidden_states=encoded, past_key_values=first.past_key_values)
    torch.testing.assert_close(step.logits[:, 0], whole[:, 5], rtol=1e-4, atol=1e-4)


def test_user_made_caches() -> None:
    model, ids = patched("bert", "random"), torch.randint(2, 64, (2, 5))
    expected = generate(model, ids, do_sample=False, use_cache=False)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        assert torch.equal(generate(model, ids, do_sample=False, past_key_values=cache), expected)
    assert isinstance(DynamicCache(config=model.config).layers[0], DynamicLayer)


class FourBits(QuantizedLayer):
    """Quantization as the libraries for it do it: by groups of 8 numbers, all of them full."""

    def __init__(self) -> None:
        super().__init__(nbits=4, q_group_size=8, residual_length=4)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, ...]:
        groups = tensor.reshape(-1, self.q_group_size)
        low = groups.amin(-1, keepdim=True)
        step = ((groups.amax(-1, keepdim=True) - low) / 15).clamp(min=1e-9)
        return ((groups - low) / step).round().to(torch.uint8), low, step, torch.tensor(tensor.shape)

    def _dequantize(self, quantized: tuple[torch.Tensor, ...]) -> torch.Tensor:
        numbers, low, step, shape = quantized
        return (numbers * step + low).reshape(shape.tolist())


@pytest.mark.parametrize("variant", ["random", "random+salience", "dense", "random+dot_product"])
def test_a_quantized_cache(variant: str) -> None:
    model, ids = patched("bert", variant), torch.randint(2, 64, (3, 5))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
        cache = Cache(layers=[FourBits() for _ in range(2)])
        first = model(input_ids=ids[:, :4], past_key_values=cache, use_cache=True)
        step = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values).logits[:, 0]
    assert (step - expected).abs().mean() < 0.2 * expected.abs().mean()  # four bits
    made = generate(model, ids, do_sample=False, past_key_values=Cache(layers=[FourBits() for _ in range(2)]))
    assert made.shape == (3, 13)


def test_generation_beyond_the_longest_sequence_says_so() -> None:
    model = patch_model(decoder("t5"), "random", max_length=10)
    with pytest.raises(SequenceTooLongError, match="N = max_length = 10"):
        model.generate(torch.randint(2, 64, (1, 5)), max_new_tokens=12, min_new_tokens=12)


def test_a_right_padded_training_batch_keeps_slot_positions() -> None:
    """position_ids that repeat on the padding must not move the tokens."""
    model = patched("bert", "random")
    ids, keep = torch.randint(2, 64, (3, 6)), mask(3, 6, "right")
    position_ids = (keep.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=keep).logits
        named = model(input_ids=ids, attention_mask=keep, position_ids=position_ids).logits
    torch.testing.assert_close(plain[keep.bool()], named[keep.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_that_is_too_long_for_a_static_cache_leaves_the_next_one_alone(variant: str, family: str) -> None:
    """Transformers keeps the capacity of the longest request; what counts are the tokens."""
    model = patch_model(decoder(family), variant, max_length=14)
    randomize_synthesizers(model)
    ids, keep = torch.randint(2, 64, (3, 5)), mask(3, 5, "left")
    expected = [generate(model, ids, do_sample=False, use_cache=False, attention_mask=m) for m in (None, keep)]
    with pytest.raises(SequenceTooLongError, match="N = max_length = 14"):
        model.generate(ids, max_new_tokens=18, min_new_tokens=18, cache_implementation="static", pad_token_id=0)
    for attention_mask, tokens in zip((None, keep), expected, strict=True):
        made = generate(model, ids, do_sample=False, cache_implementation="static", attention_mask=attention_mask)
        assert model._previous_max_cache_length > 14
        assert torch.equal(made, tokens)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_static_cache_with_more_room_than_the_longest_sequence(variant: str, backend: str, length: int) -> None:
    model = patch_model(decoder("bert"), variant, max_length=10)
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
    model, ids = patch_model(decoder("t5"), {"decoder.0": "random"}, max_length=10), torch.randint(2, 64, (2, 5))
    expected = generate(model, ids, do_sample=False, use_cache=False)
    cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=n) for n in (30, 5)))
    assert torch.equal(generate(model, ids, do_sample=False, past_key_values=cache), expected)


def test_left_padding_takes_no_positions() -> None:
    """A row of 10 tokens behind 3 pads has 13 slots, and the positions 0 to 9."""
    model = patch_model(decoder("bert"), "random", max_length=10)
    ids = torch.randint(2, 64, (1, 13))
    keep = torch.ones(1, 13, dtype=torch.long)
    keep[:, :3] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=keep, position_ids=(keep.cumsum(-1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(padded[:, 3:], model(input_ids=ids[:, 3:]).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["random", "dense", "sparse_strided"])
def test_a_compiled_step_checks_the_length_when_it_runs(variant: str) -> None:
    torch._dynamo.reset()
    model = patch_model(decoder("bert"), variant, max_length=10)
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
    model, ids = patched("bert", variant), torch.randint(2, 64, (2, 9))
    uncached = generate(model, ids, do_sample=False, use_cache=False)
    settings = {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 4}
    if max(layer.synthesizer.key_width for layer in model.modules() if hasattr(layer, "synthesizer")) > 8:
        with pytest.raises(UnsupportedModelError, match="keys of width 8, but this layer keeps 9.*prefill_chunk_size"):
            generate(model, ids, **settings)
    else:
        assert torch.equal(generate(model, ids, **settings), uncached)


@pytest.mark.parametrize("variant", ["random", "random+salience", "dense+dot_product"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_that_was_laid_out_early(variant: str, family: str) -> None:
    model, ids = patched(family, variant), torch.randint(2, 64, (2, 5))
    width = 8 if family == "bert" else 6
    cache = StaticCache(config=model.config, max_cache_len=20)
    cache.early_initialization(2, 3, width, torch.float32, torch.device("cpu"))
    if family == "t5":
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=5))
    made = generate(model, ids, do_sample=False, past_key_values=cache)
    assert torch.equal(made, generate(model, ids, do_sample=False, use_cache=False))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching_is_refused(family: str, backend: str) -> None:
    model = patched(family, "random")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_argument_that_means_other_attention_is_refused(family: str) -> None:
    model = patch_model(build("BertModel" if family == "bert" else "T5EncoderModel"), "random")
    ids = torch.tensor([[3, 4]])
    for arguments in ({"is_causal": True}, {"head_mask": torch.ones(3)}, {"softcap": 3.0}):
        with pytest.raises(UnsupportedModelError, match=f"argument {next(iter(arguments))}=.*Leave it out"):
            model(ids, **arguments)
    expected = model(ids)[0]
    assert torch.equal(model(ids, is_causal=False, num_items_in_batch=torch.tensor(2), head_mask=None)[0], expected)


class Unknown(CacheLayerMixin):
    lazy_initialization = update = get_mask_sizes = get_seq_length = get_max_length = None


@pytest.mark.parametrize(
    "cache",
    [
        Cache(layers=[Unknown(), Unknown()]),
        Cache(layers=[DynamicSlidingWindowLayer(4), DynamicSlidingWindowLayer(4)]),
        Cache(layer_class_to_replicate=Unknown),
        ((torch.zeros(1, 3, 2, 8),) * 2,) * 2,
    ],
    ids=["unknown", "sliding", "unknown to come", "tuple"],
)
def test_a_cache_of_an_unknown_kind_is_refused(cache) -> None:
    layer = patched("bert", "random").bert.encoder.layer[0].attention.self
    with pytest.raises(UnsupportedModelError, match="know the caches of Transformers that keep every token"):
        layer(torch.randn(1, 2, 24), past_key_values=cache)
