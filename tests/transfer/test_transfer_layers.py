"""Transfers beyond BERT and T5: one tiny model of each layer class, whatever its forward takes and returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.model_types import tiny_models
from hf_synthesizer import InvalidConfigError, patch_model, suggest_layers, transfer_attention
from hf_synthesizer.transfer.closed_forms import has_plain_logits
from hf_synthesizer.transfer.distill import divergence
from hf_synthesizer.transfer.observe import Call, LayerPair, observe_calls, observing, pair_layers, synthesized_weights

PLAIN = ("albert", "bart", "clip", "distilbert", "gpt2", "mpnet", "opt", "vit", "wav2vec2", "whisper")
"""Models whose logits are products of queries and keys, with a bias at most."""
CHANGED = ("esm", "gemma2", "gpt_neox", "granitemoe", "llama", "modernbert", "nomic_bert", "qwen3", "stablelm")
"""Models that rotate queries and keys, or normalise them."""


def teacher_of(model_type: str, sharpness: float = 8.0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose attention is far from uniform, and a batch without padding."""
    tiny = tiny_models.build(model_type)
    with torch.no_grad():
        for name, parameter in tiny.model.named_parameters():
            if parameter.dim() == 2 and name.split(".")[-2] in QUERIES_AND_KEYS:
                parameter.mul_(sharpness)
    inputs = {name: value for name, value in tiny.inputs.items() if isinstance(value, torch.Tensor)}
    for name in inputs:
        if name.endswith("attention_mask"):
            inputs[name] = torch.ones_like(inputs[name])
    return tiny.model, inputs


QUERIES_AND_KEYS = [
    "query",
    "key",
    "q_proj",
    "k_proj",
    "q_lin",
    "k_lin",
    "q",
    "k",
    "c_attn",
    "Wqkv",
    "qkv_proj",
    "query_key_value",
]


def student_of(teacher: Any, variant: Any) -> Any:
    return patch_model(copy.deepcopy(teacher), variant, max_length=64)


def calls_of(model: Any, teacher: Any, inputs: dict[str, torch.Tensor]) -> list[tuple[LayerPair, Call]]:
    pairs = pair_layers(model, teacher)
    found = observe_calls(teacher, pairs, inputs)
    return [(pair, call) for pair in pairs for call in found[pair.label]]


@pytest.mark.parametrize("model_type", [*PLAIN, *CHANGED])
def test_random_takes_the_mean_weights_of_every_layer_class(model_type: str) -> None:
    """softmax(R + bias), under the stock mask, is the mean over the batch; of a shared layer, over its calls too."""
    teacher, inputs = teacher_of(model_type)
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, [inputs], "average", progress=False)
    with observing(model, teacher, backend="eager"), torch.no_grad():
        calls = calls_of(model, teacher, inputs)
        for pair, call in calls:
            ours = synthesized_weights(pair.student, call)
            theirs = torch.cat([other.weights for of, other in calls if of is pair])
            torch.testing.assert_close(ours, theirs.mean(0, keepdim=True).expand_as(ours), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model_type", [*PLAIN, *CHANGED])
def test_where_stock_logits_are_taken_for_plain_products_they_are(model_type: str) -> None:
    """softmax(s · q · k + bias + mask) from the two projections alone is what the stock layer attends to, or is not."""
    teacher, inputs = teacher_of(model_type)
    model = student_of(teacher, "random+salience")
    with observing(model, teacher, backend="eager"), torch.no_grad():
        apart = 0.0
        for pair, call in calls_of(model, teacher, inputs):
            assert has_plain_logits(pair.teacher) == (model_type in PLAIN)
            apart = max(apart, (call.weights - plain_weights(pair, call)).abs().max().item())
    assert (apart < 1e-5) == (model_type in PLAIN), apart


def plain_weights(pair: LayerPair, call: Call) -> torch.Tensor:
    from hf_synthesizer.layers.finding.projections import projection_of

    heads = pair.student.dimensions[1]
    query, key = (
        projection_of(pair.teacher, pair.student.projection_names, name)(call.hidden_states).unflatten(-1, (heads, -1))
        for name in ("query", "key")
    )
    logits = torch.einsum("bihc,bjhc->bhij", query, key) * pair.student.logit_scaling
    if call.position_bias is not None:
        logits = logits + call.position_bias
    return logits.masked_fill(~call.pairs.unsqueeze(1), float("-inf")).softmax(-1)


@pytest.mark.parametrize("model_type", PLAIN)
@pytest.mark.parametrize("variant", ["dense+salience", "random+salience"])
def test_first_order_terms_bring_every_plain_layer_class_nearer(model_type: str, variant: str) -> None:
    teacher, inputs = teacher_of(model_type, sharpness=3.0)
    model = student_of(teacher, variant)
    report = transfer_attention(model, teacher, [inputs], "average", progress=False)
    assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)


@pytest.mark.parametrize("variant", ["dense", "random+salience"])
def test_first_order_terms_of_rotated_queries_are_refused_before_anything_is_done(variant: str) -> None:
    teacher, inputs = teacher_of("llama")
    model = student_of(teacher, variant)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidConfigError, match="LlamaAttention rotates, normalises"):
        transfer_attention(model, teacher, [inputs], "average", progress=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "vit", "bart", "wav2vec2", "clip"])
def test_a_decoder_an_image_a_pair_of_stacks_sound_and_towers_are_distilled(model_type: str) -> None:
    teacher, inputs = teacher_of(model_type)
    model = student_of(teacher, "dense+salience")
    report = transfer_attention(model, teacher, [inputs], "distill", steps=(6, 0), learning_rate=1e-2, progress=False)
    assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)
    report = transfer_attention(model, teacher, [inputs], "distill", steps=(0, 12), learning_rate=1e-3, progress=False)
    assert report.error_after < report.error_before


@pytest.mark.parametrize("model_type", ["llama", "vit", "bart"])
def test_layers_of_a_decoder_an_image_and_a_pair_of_stacks_are_suggested(model_type: str) -> None:
    teacher, inputs = teacher_of(model_type)
    suggestion = suggest_layers(teacher, [inputs], "random", 1, steps=2, progress=False, max_length=64)
    assert len(suggestion) == 1 and all(cost > 0 for cost in suggestion.costs.values())
    patch_model(copy.deepcopy(teacher), suggestion, max_length=64)


def test_the_future_and_padding_count_in_no_mean() -> None:
    """A decoder's mean is over the pairs j ≤ i of two tokens; a pair that no row has goes on along its diagonal."""
    teacher, inputs = teacher_of("llama")
    inputs["attention_mask"][0, 6:] = 0
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, [inputs], "average", progress=False)
    with observing(model, teacher, backend="eager"), torch.no_grad():
        for pair, call in calls_of(model, teacher, inputs):
            table = pair.student.synthesizer.table
            both, one = call.weights.mean(0), call.weights[1]
            for i in range(10):
                for j in range(i + 1):
                    expected = both[:, i, j] if i < 6 else one[:, i, j]
                    torch.testing.assert_close(table[:, i, j].exp(), expected, rtol=1e-3, atol=1e-6)
            assert divergence(call, synthesized_weights(pair.student, call)) < 10


def test_a_batch_that_does_not_reach_a_patched_tower_is_refused() -> None:
    teacher, inputs = teacher_of("qwen2_vl")
    model = student_of(teacher, "random")
    with pytest.raises(InvalidConfigError, match=r"does not reach layer 'visual\.0'"):
        transfer_attention(model, teacher, [inputs], "average", progress=False)


def test_a_model_with_its_own_backends_has_them_again() -> None:
    teacher, inputs = teacher_of("vision-encoder-decoder")
    teacher.encoder.set_attn_implementation("eager")
    model = student_of(teacher, {"decoder": "random"})
    modes = [module.config._attn_implementation for module in (teacher, teacher.encoder, teacher.decoder)]
    transfer_attention(model, teacher, [inputs], "average", progress=False)
    assert modes == [module.config._attn_implementation for module in (teacher, teacher.encoder, teacher.decoder)]


def test_a_layer_that_tells_no_weights_cannot_teach() -> None:
    class Silent(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    from hf_synthesizer import UnsupportedModelError
    from hf_synthesizer.transfer.observe import weights_in

    with pytest.raises(UnsupportedModelError, match="Silent does not return its attention weights"):
        weights_in(Silent()(torch.ones(1, 2, 3)), Silent())
