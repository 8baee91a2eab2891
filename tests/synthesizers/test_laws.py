"""What must hold for each variant whatever its code looks like."""

from __future__ import annotations

import pytest
import torch

from hf_synthesizer import SynthesizerAttention, SynthesizerConfig, patch_model
from hf_synthesizer.synthesizers import build_synthesizer
from tests.helpers.layers import GENERATING, LAYER_CLASSES
from tests.helpers.models import CHOOSING, MAX_LENGTH, VARIANTS, build, mask, matrix, randomize, read_by_encoder

N, HEADS, WIDTH = 12, 3, 12
ENCODERS = tuple(head for head, sample in LAYER_CLASSES.items() if sample.takes == "text" and not sample.generates)
STATIC = ("random", "fixed_random", "factorized_random")


def synthesizer(variant: str, **options):
    return randomize(build_synthesizer(SynthesizerConfig(variant, **options), WIDTH, HEADS, N))


def weights_of(layer: SynthesizerAttention, hidden_states: torch.Tensor) -> torch.Tensor:
    return layer(hidden_states)[1].detach()


@pytest.mark.parametrize("variant", STATIC)
def test_static_weights_do_not_depend_on_the_input(variant: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=N))
    first, second = weights_of(layer, torch.randn(2, 7, WIDTH)), weights_of(layer, torch.randn(2, 7, WIDTH))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["dense", "factorized_dense", "random+dense"])
def test_a_dense_row_depends_on_its_own_token_alone(variant: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=N))
    hidden_states = torch.randn(1, 7, WIDTH)
    changed = hidden_states.clone()
    changed[:, 3] += 1.0
    before, after = weights_of(layer, hidden_states), weights_of(layer, changed)
    others = [i for i in range(7) if i != 3]
    torch.testing.assert_close(before[:, :, others], after[:, :, others], rtol=1e-6, atol=1e-6)
    assert (before[:, :, 3] - after[:, :, 3]).abs().max() > 1e-2


def test_salience_depends_on_the_key_token_alone() -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant="salience", max_length=N))
    logits = layer.synthesizer(torch.randn(2, 7, WIDTH)).materialize()
    assert torch.equal(logits, logits[:, :, :1].expand_as(logits))


@pytest.mark.parametrize("factors", [None, (4, 3), (3, 4), (5, 3)])
def test_factorized_dense_rows_are_outer_products_with_distinct_columns(factors) -> None:
    made = synthesizer("factorized_dense", factors=factors)
    a, b = made.factors
    assert a * b >= N
    logits = made(torch.randn(2, N, WIDTH)).materialize().detach()  # (2, H, N, N)
    full = torch.zeros(*logits.shape[:-1], a * b)
    full[..., :N] = logits
    whole_rows = N // a  # the last row of the grid may be cut off
    grid = full.unflatten(-1, (b, a))[..., :whole_rows, :]
    rank = torch.linalg.matrix_rank(grid.double(), rtol=1e-4)
    assert rank.max() == 1
    columns = logits.flatten(0, 2).T  # one column a key
    assert len(torch.unique(columns, dim=0)) == N


@pytest.mark.parametrize("max_length", [1, 2, 7, 12, 13, 97, 512, 513])
def test_default_factors_cover_every_length(max_length: int) -> None:
    from hf_synthesizer.synthesizers.factorized_dense import default_factors

    a, b = default_factors(max_length)
    assert a * b >= max_length and b <= a <= max(4 * b, 3)
    assert default_factors(512) == (32, 16)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_factorized_random_has_at_most_its_rank(rank: int) -> None:
    logits = synthesizer("factorized_random", rank=rank)(torch.randn(1, N, WIDTH)).materialize()
    assert torch.linalg.matrix_rank(logits.detach().double(), rtol=1e-5).max() == rank


@matrix("BertModel", "T5EncoderModel", layers=ENCODERS, padding=["right", "left"])
def test_a_padded_token_changes_no_other_position(variant: str, head: str, padding: str) -> None:
    model = patch_model(build(head), variant)
    randomize_synthesizers(model)
    ids, keep = torch.randint(2, 64, (3, 8)), mask(3, 8, padding)
    changed = torch.where(keep.bool(), ids, (ids + 7) % 64)
    model = model.base_model
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=keep)[0]
        after = model(input_ids=changed, attention_mask=keep)[0]
    torch.testing.assert_close(before[keep.bool()], after[keep.bool()], rtol=0, atol=0)


@matrix(
    "BertLMHeadModel", "T5ForConditionalGeneration", layers=GENERATING, masked=[True, False], backend=["eager", "sdpa"]
)
def test_a_decoder_does_not_see_the_future(variant: str, head: str, masked: bool, backend: str) -> None:
    """∂y_t/∂x_{>t} = 0, also where Transformers passes no mask and leaves causality to the module."""
    model = build(head)
    model.set_attn_implementation(backend)
    randomize_synthesizers(patch_model(model, variant))
    length, t = 7, 3
    embeds = torch.randn(2, length, 24, requires_grad=True)
    keep = mask(2, length, "right") if masked else None
    if model.config.is_encoder_decoder:
        read = read_by_encoder(head, 2, 5)
        logits = model(**read, decoder_inputs_embeds=embeds, decoder_attention_mask=keep, use_cache=False).logits
    else:
        logits = model(inputs_embeds=embeds, attention_mask=keep, use_cache=False).logits
    logits[:, t].pow(2).sum().backward()
    assert embeds.grad[:, t + 1 :].abs().max() == 0
    assert embeds.grad[:, : t + 1].abs().min() > 0


def randomize_synthesizers(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "synthesizer"):
            randomize(module.synthesizer)


def test_handcrafted_patterns_come_back_from_softmax() -> None:
    table = build_synthesizer(SynthesizerConfig("random", init="handcrafted"), 64, 8, 16).table.detach()
    identity, following, previous, left, right, end, start, default = table.softmax(-1)
    steps = torch.arange(15)
    assert identity.diagonal().min() > 0.99
    assert following[steps, steps + 1].min() > 0.99 and previous[steps + 1, steps].min() > 0.99
    assert left.triu(0)[1:].sum(-1).max() < 1e-3 and right.tril(0)[:-1].sum(-1).max() < 1e-3
    assert (end.diff(dim=-1) > 0).all() and (start.diff(dim=-1) < 0).all()
    assert default.max() < 0.1


def test_handcrafted_patterns_mean_the_end_of_the_sequence_at_hand() -> None:
    made = build_synthesizer(SynthesizerConfig("random", init="handcrafted"), 64, 8, 512)
    end = made(torch.randn(1, 10, 64)).materialize()[0, 5].softmax(-1)
    expected = torch.arange(1.0, 11).pow(3)
    torch.testing.assert_close(end, (expected / expected.sum()).expand(10, 10), rtol=1e-4, atol=1e-5)


def test_handcrafted_with_fewer_heads_takes_the_first_patterns() -> None:
    table = build_synthesizer(SynthesizerConfig("random", init="handcrafted"), 8, 2, 16).table.softmax(-1)
    assert table[0].diagonal().min() > 0.99 and table[1].diagonal(1).min() > 0.99


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "dot_product" not in v and v not in CHOOSING])
def test_fresh_attention_is_near_uniform(variant: str) -> None:
    layer = SynthesizerAttention(64, 4, variant=variant, max_length=32)
    weights = weights_of(layer, torch.randn(2, 32, 64))
    assert (weights * 32 - 1).abs().max() < 0.9


def test_torchs_seed_decides_the_initialisation(variant: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=MAX_LENGTH).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
