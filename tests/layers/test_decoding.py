"""Generation with a cache: the same tokens as without, values alone in the cache, padding without influence."""

from __future__ import annotations

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from hf_synthesizer import SequenceTooLongError, patch_model
from hf_synthesizer.layers.finding.projections import head_dim
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.layers.stock_forward import StockForwardLayer
from tests.helpers.layers import GENERATING, LAYER_CLASSES
from tests.helpers.models import CHOOSING, build, first_output, mask, matrix, read_by_encoder
from tests.synthesizers.test_laws import randomize_synthesizers

HEADS = ("BertLMHeadModel", "T5ForConditionalGeneration")
CACHING = (*GENERATING, "Qwen2VLTextModel")
PADDED = tuple(head for head in GENERATING if LAYER_CLASSES[head].takes == "text")
"""Those for which padding on the left changes nothing."""
STRATEGIES = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True},
}


def patched(head: str, variant: str):
    model = patch_model(build(head), variant)
    randomize_synthesizers(model)
    return model


def generate(model, ids: torch.Tensor, **settings) -> torch.Tensor:
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **settings)


def what_is_read(head: str, rows: int, length: int) -> torch.Tensor:
    """What generation starts from: the tokens so far, or what the encoder reads."""
    return next(iter(read_by_encoder(head, rows, length).values()), torch.randint(2, 64, (rows, length)))


@pytest.mark.feature("generate with a cache")
@matrix(*HEADS, layers=GENERATING, strategy=[*STRATEGIES])
def test_cached_equals_uncached(variant: str, head: str, strategy: str) -> None:
    model, ids = patched(head, variant), what_is_read(head, 2, 5)
    settings = STRATEGIES[strategy]
    uncached = generate(model, ids, use_cache=False, **settings)
    assert torch.equal(generate(model, ids, **settings), uncached)
    assert torch.equal(generate(model, ids, cache_implementation="static", **settings), uncached)


@matrix(*HEADS, layers=CACHING, backend=["eager", "sdpa"])
def test_logits_of_each_step_equal_those_of_the_whole_sequence(variant: str, head: str, backend: str) -> None:
    model = patched(head, variant)
    model.set_attn_implementation(backend)
    ids, encoder = torch.randint(2, 64, (2, 9)), read_by_encoder(head, 2, 5)
    name = "decoder_input_ids" if encoder else "input_ids"
    with torch.no_grad():
        whole = first_output(model(**encoder, **{name: ids}, use_cache=False))
        cache = None
        for chunk in (ids[:, :4], ids[:, 4:5], ids[:, 5:8], ids[:, 8:]):
            out = model(**encoder, **{name: chunk}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            length = cache.get_seq_length()
            expected = whole[:, length - chunk.shape[1] : length]
            torch.testing.assert_close(first_output(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.feature("generate from left-padded rows")
@matrix(*HEADS, layers=PADDED, use_cache=[True, False])
def test_left_padded_batches_equal_one_by_one(variant: str, head: str, use_cache: bool) -> None:
    model, ids, keep = patched(head, variant), torch.randint(2, 64, (3, 6)), mask(3, 6, "left")
    together = generate(model, ids, attention_mask=keep, do_sample=False, use_cache=use_cache)
    for row in range(3):
        alone = generate(model, ids[row : row + 1, row:], do_sample=False, use_cache=use_cache)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.feature("static cache")
@pytest.mark.parametrize("variant", ["random", "dense", "factorized_dense+salience"])
@pytest.mark.parametrize("head", [*HEADS, *PADDED])
def test_left_padded_batches_in_a_static_cache(variant: str, head: str) -> None:
    model, ids, keep = patched(head, variant), torch.randint(2, 64, (3, 6)), mask(3, 6, "left")
    settings = {"attention_mask": keep, "do_sample": False}
    static = generate(model, ids, cache_implementation="static", **settings)
    assert torch.equal(static, generate(model, ids, use_cache=False, **settings))


@matrix(*HEADS, layers=CACHING)
def test_a_synthesized_layer_caches_values_only(variant: str, head: str) -> None:
    model, ids, encoder = patched(head, variant), torch.randint(2, 64, (2, 5)), read_by_encoder(head, 2, 5)
    layer = [module for module in model.modules() if isinstance(module, SynthesizerMixin)][-1]
    groups = getattr(
        layer, "num_key_value_groups", 1
    )  # heads that share values keep their key-side states side by side
    width = max(1, layer.synthesizer.key_width * groups)
    with torch.no_grad():
        cache = model(
            **encoder, **{"decoder_input_ids" if encoder else "input_ids": ids}, use_cache=True
        ).past_key_values
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if isinstance(layer, StockForwardLayer):  # which keeps what the stock forward keeps, and its own beside
        width = head_dim(layer) + layer.synthesizer.key_width * groups
    assert all(kept.keys.shape[-1] == width and kept.values.shape[-2] == 5 for kept in cache.layers)
    assert cache.get_seq_length() == 5
    if "dot_product" not in variant and variant not in CHOOSING and not isinstance(layer, StockForwardLayer):
        assert width == (groups if "salience" in variant else 1)


def test_a_hybrid_mixes_stock_and_synthesized_caches() -> None:
    model = patch_model(build("BertLMHeadModel"), {0: "random"})
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
    model, ids = patched("BertLMHeadModel", "random"), torch.randint(2, 64, (2, 5))
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


@pytest.mark.feature("quantized cache")
@pytest.mark.parametrize("variant", ["random", "random+salience", "dense", "random+dot_product"])
def test_a_quantized_cache(variant: str) -> None:
    model, ids = patched("BertLMHeadModel", variant), torch.randint(2, 64, (3, 5))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
        cache = Cache(layers=[FourBits() for _ in range(2)])
        first = model(input_ids=ids[:, :4], past_key_values=cache, use_cache=True)
        step = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values).logits[:, 0]
    assert (step - expected).abs().mean() < 0.2 * expected.abs().mean()  # four bits
    made = generate(model, ids, do_sample=False, past_key_values=Cache(layers=[FourBits() for _ in range(2)]))
    assert made.shape == (3, 13)


def test_generation_beyond_the_longest_sequence_says_so() -> None:
    model = patch_model(build("T5ForConditionalGeneration"), "random", max_length=10)
    with pytest.raises(SequenceTooLongError, match="N = max_length = 10"):
        model.generate(torch.randint(2, 64, (1, 5)), max_new_tokens=12, min_new_tokens=12)


def test_a_right_padded_training_batch_keeps_index_positions() -> None:
    """position_ids that repeat on the padding must not move the tokens."""
    model = patched("BertLMHeadModel", "random")
    ids, keep = torch.randint(2, 64, (3, 6)), mask(3, 6, "right")
    position_ids = (keep.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=keep).logits
        named = model(input_ids=ids, attention_mask=keep, position_ids=position_ids).logits
    torch.testing.assert_close(plain[keep.bool()], named[keep.bool()], rtol=1e-5, atol=1e-5)
