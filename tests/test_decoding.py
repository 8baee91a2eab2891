"""Generation with a cache: the same tokens as without, values alone in the cache, padding without influence."""

from __future__ import annotations

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from hf_synthesizer import SequenceTooLongError, patch_model
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
