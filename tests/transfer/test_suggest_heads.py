"""suggest_heads: what each head's swap costs, which heads go on comparing, and how a suggestion travels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_synthesizer import (
    AlreadyPatchedError,
    InvalidConfigError,
    Suggestion,
    SynthesizerConfig,
    patch_model,
    suggest_heads,
    transfer_attention,
)
from hf_synthesizer.transfer import suggest
from hf_synthesizer.transfer.distill import answers_of
from hf_synthesizer.transfer.head_gates import gated
from hf_synthesizer.transfer.observe import observing, pair_layers
from hf_synthesizer.transfer.suggest import change_of_answers, head_costs
from tests.helpers.models import build
from tests.helpers.teaching import HEADS, loader, sharp, student_of
from tests.layers.test_heads_in_models import DECODERS, causal_model


@pytest.mark.parametrize("kind", ["bert", "t5", "llama", "gpt2"])
def test_open_gates_are_the_patched_model(kind: str) -> None:
    """Stock with the gates of some heads open answers as a model with these heads synthesized."""
    teacher = sharp(HEADS[kind]) if kind in HEADS else causal_model(kind)
    batches = loader(HEADS[kind]) if kind in HEADS else [{"input_ids": torch.randint(3, 64, (3, 9))} for _ in range(2)]
    whole, some = student_of(teacher, "random"), student_of(teacher, SynthesizerConfig("random", heads=[0, 2]))
    for model in (whole, some):
        transfer_attention(model, teacher, batches, method="average", progress=False)
    pairs = pair_layers(whole, teacher)
    heads = {pair.label: pair.student.dimensions[1] for pair in pairs}
    with torch.no_grad(), observing(teacher, whole, some), gated(pairs) as gates:
        before = answers_of(teacher, batches[0])
        gates.choose(dict.fromkeys(heads, [0, 2]), heads)
        torch.testing.assert_close(answers_of(teacher, batches[0]), answers_of(some, batches[0]), rtol=1e-3, atol=1e-4)
        gates.choose({}, heads)
        assert torch.equal(answers_of(teacher, batches[0]), before)
    with torch.no_grad(), observing(teacher):
        assert torch.equal(answers_of(teacher, batches[0]), before)


def test_costs_are_what_a_small_step_of_each_gate_does() -> None:
    """Σ_rows |∂answers/∂g|² / Σ |answers|², by differences."""
    teacher, batches = sharp(HEADS["bert"]).double(), loader(HEADS["bert"], count=2)
    student = student_of(teacher, "random")
    transfer_attention(student, teacher, batches, method="average", progress=False)
    pairs = pair_layers(student, teacher)
    heads = {pair.label: 3 for pair in pairs}
    with observing(teacher, student), gated(pairs) as gates:
        costs = head_costs(teacher, gates, batches, heads)
        for label in heads:
            for head in range(3):
                gates.choose({label: [head]}, heads)
                gates.fixed_gates[label] *= 1e-3
                expected = change = power = 0.0
                with torch.no_grad():
                    for inputs in batches:
                        moved, gates.fixed_gates = answers_of(teacher, inputs), {**gates.fixed_gates}
                        held, gates.fixed_gates = gates.fixed_gates, {}
                        stock = answers_of(teacher, inputs)
                        gates.fixed_gates = held
                        change += (moved - stock).double().square().sum().item()
                        power += stock.double().square().sum().item()
                expected = change / power / 1e-6
                assert costs[label][head] == pytest.approx(expected, rel=0.05, abs=1e-7)


@pytest.mark.parametrize("head", [HEADS["bert"], HEADS["t5"], "BertModel"])
def test_a_suggestion_is_a_plan_for_patch_model(head: str) -> None:
    teacher, batches = sharp(head), loader(head)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    suggestion = suggest_heads(teacher, batches, "random+salience", budget=0.5, batches=2, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    assert not any(module._forward_pre_hooks for module in teacher.modules())
    layers = 2 if head.startswith("Bert") else 4
    assert suggestion.num_heads == 3 * layers and sum(map(len, suggestion.heads.values())) == -(-3 * layers // 2)
    dearest = max(cost for key, row in suggestion.heads.items() for cost in [suggestion.costs[key][h] for h in row])
    left = [c for key, row in suggestion.costs.items() for h, c in enumerate(row) if h not in suggestion.heads[key]]
    assert dearest <= min(left) and len(suggestion.curve) == 1
    model = patch_model(copy.deepcopy(teacher), suggestion)
    assert model.config.synthesizer["layers"].keys() == ({"encoder"} if layers == 2 else {"encoder", "decoder"})


def test_one_run_measures_a_curve() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    suggestion = suggest_heads(teacher, batches, "random", budget=[0.5, 1.0, 2, 0.75], progress=False)
    assert list(suggestion.curve) == [2, 3, 5, 6] and suggestion.budget == 0.75
    assert sum(map(len, suggestion.heads.values())) == 5
    student = patch_model(copy.deepcopy(teacher), suggestion.at(2))
    transfer_attention(student, teacher, batches, method="average", progress=False)
    with torch.no_grad(), observing(teacher, student):
        pairs = [[answers_of(model, inputs) for inputs in batches] for model in (student, teacher)]
    change = sum((a - b).square().sum() for a, b in zip(*pairs, strict=True)) / sum(b.square().sum() for b in pairs[1])
    assert suggestion.curve[2] == pytest.approx(change.item(), rel=1e-2)
    whole = patch_model(copy.deepcopy(teacher), suggestion.at(1.0))
    assert [row["variant"] for row in whole.config.synthesizer["configs"]] == ["random"]
    assert "heads" not in whole.config.synthesizer["configs"][0]


def test_a_decoder_with_shared_keys_keeps_little_of_its_cache_by_its_own_suggestion() -> None:
    """Forty heads, two to a key: the four that go on comparing tokens are two keys', where each by itself would be four keys'."""
    config = DECODERS["llama"]()
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 80, 20, 10, 16
    teacher = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 64, (3, 9))

    def kept(model: Any) -> int:
        with torch.no_grad():
            layers = model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values.layers
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    suggestion = suggest_heads(teacher, [{"input_ids": ids}], "random", 0.9, progress=False)
    assert suggestion.shared == {0: 2, 1: 2} and sum(map(len, suggestion.heads.values())) == 36
    for layer, row in suggestion.costs.items():  # a worse case than chance: heads of a key cost as different as can be
        suggestion.costs[layer] = [cost + (head % 2) * 100 for head, cost in enumerate(row)]
    again = Suggestion.from_dict(suggestion.to_dict())
    for plan in (suggestion, suggestion.at(0.9), again.at(36)):
        assert kept(patch_model(copy.deepcopy(teacher), plan)) <= 0.6 * kept(teacher)
    alone = Suggestion.of_heads(suggestion.variant, suggestion.costs, 0.9)
    assert kept(patch_model(copy.deepcopy(teacher), alone)) > 0.6 * kept(teacher)
    assert suggest_heads(teacher, [{"input_ids": ids}], "random", whole_keys=False, progress=False).shared == {}


def test_a_suggestion_prints_is_edited_and_travels(tmp_path: Path) -> None:
    costs = {0: [0.1, 0.0, 0.3], 1: [0.2, 0.4, 0.05]}
    suggestion = Suggestion.of_heads(SynthesizerConfig("random"), costs, 4, {4: 0.01})
    assert suggestion.heads == {0: [0, 1], 1: [0, 2]} and suggestion.order[0] == (0, 1)
    printed = str(suggestion)
    assert "4 of 6 heads get random; 2 keep stock attention" in printed and "67%" in printed
    assert [line.split() for line in suggestion.picture().splitlines()] == [["0", "·", "·", "█"], ["1", "·", "█", "·"]]
    suggestion[0] = suggestion[0].replace(heads=[1])
    del suggestion[1]
    assert suggestion.heads == {0: [1], 1: []}
    suggestion.save(tmp_path / "heads.json")
    again = Suggestion.load(tmp_path / "heads.json")
    assert again == suggestion and again.costs == costs and again.curve == {4: 0.01} and str(again) == str(suggestion)
    again[1] = [SynthesizerConfig("dense", heads=[2]), SynthesizerConfig("random", heads=[0])]
    assert Suggestion.from_dict(again.to_dict()) == again and again.heads[1] == [0, 2] and "2 of 3 dense" in str(again)
    del again[1]
    model = patch_model(build("BertModel"), again, max_length=12)
    assert model.config.synthesizer["configs"] == [{"variant": "random", "max_length": 12, "heads": [1]}]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidConfigError, match="no suggestion of suggest_layers or suggest_heads"):
        Suggestion.load(tmp_path / "other.json")


def test_a_suggestion_of_layers_is_saved_too_and_has_no_heads(tmp_path: Path) -> None:
    suggestion = Suggestion({1: "random"}, {"encoder.0": 0.4, "encoder.1": 0.1}, {"encoder.1": 0.1})
    suggestion.save(tmp_path / "layers.json")
    again = Suggestion.load(tmp_path / "layers.json")
    assert again == suggestion and again.costs == suggestion.costs and again.total == suggestion.total
    assert str(again) == str(suggestion) and [line.split()[0] for line in str(again).splitlines()[2:]] == [
        "encoder.1",
        "encoder.0",
    ]
    for use in (lambda: again.at(0.5), lambda: again.heads, lambda: again.order, again.picture):
        with pytest.raises(InvalidConfigError, match="costs of whole layers"):
            use()


@pytest.mark.parametrize("budget", [0, 1.5, -1, 7, True, "half", [], [0.5, 0]])
def test_a_budget_that_cannot_be(budget) -> None:
    with pytest.raises(InvalidConfigError, match="budget"):
        suggest_heads(build(HEADS["bert"]), loader(HEADS["bert"]), "random", budget=budget)


def test_a_patched_model_is_no_teacher() -> None:
    with pytest.raises(AlreadyPatchedError, match="suggest_heads needs a stock model"):
        suggest_heads(patch_model(build(HEADS["bert"]), "dense"), [], "random")


def test_a_variant_without_a_closed_form_is_trained_first() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    suggestion = suggest_heads(teacher, batches, "sparse_strided", budget=1, steps=2, progress=False)
    assert sum(map(len, suggestion.heads.values())) == 1


def test_a_training_before_the_measurement_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is measured by a step that changes nothing that follows."""
    said: list[str] = []
    monkeypatch.setattr(suggest.logger, "warning", lambda message, *values: said.append(message % values))
    texts: Any = [inputs for batch in loader(HEADS["bert"]) for inputs in [batch]]
    found = []
    for announced in (20, 10**9):
        monkeypatch.setattr(suggest, "ANNOUNCED_STEPS", announced)
        torch.manual_seed(0)
        order = torch.utils.data.DataLoader(
            texts, batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        found.append(suggest_heads(sharp(HEADS["bert"]), order, "sparse_strided", 1, steps=20, progress=False).costs)
    assert found[0] == found[1] and len(said) == 1
    assert "trained for 20 steps" in said[0] and "takes about" in said[0] and "seconds here" in said[0]


def test_swaps_together_are_measured_with_the_same_gates() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    student = student_of(teacher, "random")
    pairs = pair_layers(student, teacher)
    heads = {pair.label: 3 for pair in pairs}
    with observing(teacher, student), gated(pairs) as gates:
        nothing = change_of_answers(teacher, gates, batches, {}, heads)
        everything = change_of_answers(teacher, gates, batches, dict.fromkeys(heads, [0, 1, 2]), heads)
    assert nothing == 0.0 < everything
