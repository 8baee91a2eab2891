"""What logits by distance take from their teacher in one pass, with and without rotated queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3Model

from hf_synthesizer import InvalidConfigError, patch_model, transfer_attention
from hf_synthesizer.synthesizers import Synthesizer
from hf_synthesizer.transfer import closed_forms
from hf_synthesizer.transfer.closed_forms import has_rotated_logits
from hf_synthesizer.transfer.distill import divergences
from hf_synthesizer.transfer.observe import Call, LayerPair, observe_calls, observing, pair_layers, synthesized_weights
from tests.helpers.teaching import student_of

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=50)


def llama(**options: Any) -> LlamaForCausalLM:
    """A decoder with sharp attention, in which two heads share their keys."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64, attention_bias=True, **options)
    return sharpened(LlamaForCausalLM(config))


def bert() -> BertModel:
    """An encoder with sharp attention."""
    torch.manual_seed(0)
    return sharpened(BertModel(BertConfig(**SMALL, max_position_embeddings=64)))


def sharpened(model: Any) -> Any:
    """Queries and keys are so large that weights differ."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query", "key")):
                parameter.normal_(std=0.4)
    return model.eval()


def batches(number: int = 6, length: int = 20) -> list[dict[str, torch.Tensor]]:
    """Rows of several lengths, padded on the right."""
    torch.manual_seed(1)
    found = []
    for place in range(number):
        ids = torch.randint(1, 50, (4, length))
        mask = torch.ones_like(ids)
        mask[1, length - 2 - place :] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def weights_by_layer(
    model: PreTrainedModel, teacher: PreTrainedModel, rows: list[dict[str, torch.Tensor]]
) -> Iterator[tuple[Call, torch.Tensor]]:
    """For each batch and layer: the teacher's call, and the student's weights on the teacher's hidden states."""
    pairs: list[LayerPair] = pair_layers(model, teacher)
    with observing(teacher, model, backend="eager"):
        for inputs in rows:
            calls = observe_calls(teacher, pairs, inputs)
            for pair in pairs:
                for call in calls[pair.label]:
                    yield call, synthesized_weights(pair.student, call)


def loss(model: PreTrainedModel, teacher: PreTrainedModel, rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The summed divergence of the student's weights from the teacher's on the keys that the student sees."""
    found = []
    for call, weights in weights_by_layer(model, teacher, rows):
        near = call.weights * (weights > 0)
        found.append(divergences(replace(call, weights=near / near.sum(-1, True).clamp(min=1e-20)), weights).sum())
    return torch.stack(found).sum()


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("options", [{}, {"window": 6}], ids=["all keys", "window"])
def test_relative_has_the_table_of_least_divergence(make: Any, options: dict[str, int]) -> None:
    """Training gains less than a thirtieth of what the closed form gained."""
    teacher, rows = make(), batches()
    model = student_of(teacher, "relative", max_distance=8, sinks=2, **options)
    fresh = loss(model, teacher, rows).item()
    transfer_attention(model, teacher, rows, method="average", progress=False)
    closed = loss(model, teacher, rows)
    parameters = [
        parameter for module in model.modules() if isinstance(module, Synthesizer) for parameter in module.parameters()
    ]
    optimizer = torch.optim.LBFGS(parameters, max_iter=60, line_search_fn="strong_wolfe")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, teacher, rows)
        value.backward()
        return value

    optimizer.step(step)
    least = loss(model, teacher, rows).item()
    assert least <= closed.item() < fresh
    assert closed.item() - least < 0.03 * (fresh - least)


def test_relative_dense_is_exact_if_all_rotated_keys_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """R_i q_i · R_j k̄ depends on the token and on the distance alone."""
    monkeypatch.setattr(closed_forms, "MATCH_STEPS", 80)
    teacher = llama()
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.k_proj.weight.zero_()
            layer.self_attn.k_proj.bias.normal_()
    model = student_of(teacher, "relative_dense", max_distance=24, sinks=2)
    rows = batches()
    transfer_attention(model, teacher, rows, method="average", progress=False)
    with torch.no_grad():
        for call, weights in weights_by_layer(model, teacher, rows):
            torch.testing.assert_close(weights[0], call.weights[0], rtol=1e-2, atol=2e-3)  # relu cuts off a little


@pytest.mark.parametrize("make", [bert, llama])
def test_relative_dense_comes_nearer_than_relative(make: Any) -> None:
    teacher, rows, found = make(), batches(), {}
    for variant in ("relative", "relative_dense"):
        model = student_of(teacher, variant, max_distance=8, sinks=2)
        transfer_attention(model, teacher, rows, method="average", progress=False)
        found[variant] = loss(model, teacher, rows).item()
    assert found["relative_dense"] < found["relative"]


def test_heads_of_a_decoder_take_a_closed_form_each() -> None:
    teacher, rows = llama(), batches()
    model = patch_model(llama(), "relative_dense", heads=[0, 1], max_distance=8)
    report = transfer_attention(model, teacher, rows, method="average", progress=False)
    assert report.steps == 0


def test_normalised_keys_have_no_mean_key_to_rotate() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    teacher = Qwen3Model(config).eval()
    assert not has_rotated_logits(teacher.layers[0].self_attn)
    assert has_rotated_logits(llama().model.layers[0].self_attn)
    model = student_of(teacher, "relative_dense", max_distance=8)
    with pytest.raises(InvalidConfigError, match="no closed form of 'relative_dense'"):
        transfer_attention(model, teacher, batches(), method="average", progress=False)
