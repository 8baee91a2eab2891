"""suggest_heads with a menu: what each kind of heads needs and costs, and the cheapest plan under each kind of budget."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_synthesizer import (
    InvalidConfigError,
    Suggestion,
    SynthesizerConfig,
    UnsupportedModelError,
    patch_model,
    suggest_heads,
    transfer_attention,
)
from hf_synthesizer.measuring.costs import cost_report
from hf_synthesizer.measuring.flops import count_flops
from hf_synthesizer.synthesizers import build_synthesizer
from hf_synthesizer.synthesizers.head_sizes import STOCK_HEAD, HeadShape, cached_numbers, multiply_adds, visible_pairs
from hf_synthesizer.transfer.budgets import ResourceBudget
from hf_synthesizer.transfer.distill import answers_of
from hf_synthesizer.transfer.observe import observing
from tests.helpers.models import MAX_LENGTH, build
from tests.helpers.teaching import HEADS, loader, sharp
from tests.layers.test_heads_in_models import causal_model

WINDOW = {"variant": "dot_product", "window": 3, "sinks": 1}
RELATIVE = {"variant": "relative", "max_distance": 2, "sinks": 1}
KINDS = [SynthesizerConfig(**RELATIVE), SynthesizerConfig(**WINDOW), SynthesizerConfig("random")]
LENGTH = 12
CACHE, PRODUCTS = {"cache": 0.5, "length": LENGTH}, {"multiply_adds": 0.6, "length": LENGTH}


def random_costs(chance: random.Random, layers: int = 2, heads: int = 2) -> list[dict[int | str, list[float]]]:
    return [{layer: [chance.random() for _ in range(heads)] for layer in range(layers)} for _ in KINDS]


def all_plans(costs: list[dict], needs: list[float]) -> list[tuple[int, float, float, tuple[int, ...]]]:
    """Every plan of two layers of two heads: the number of synthesized heads, the cost, the need, the choices."""
    places = [(layer, head) for layer in (0, 1) for head in (0, 1)]
    plans = []
    for choices in itertools.product(range(4), repeat=4):
        cost = sum(costs[kind - 1][layer][head] for (layer, head), kind in zip(places, choices, strict=True) if kind)
        plans.append((sum(map(bool, choices)), cost, sum(needs[kind] for kind in choices), choices))
    return plans


def choices_of(plan: Suggestion) -> tuple[int, ...]:
    numbers = {(layer, head): number for number, heads in enumerate(plan.heads_by_kind.values(), 1)
               for layer, row in heads.items() for head in row}  # fmt: skip
    return tuple(numbers.get((layer, head), 0) for layer in (0, 1) for head in (0, 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_the_cheapest_of_all(seed: int) -> None:
    """By trying all 4⁴ plans. Of a number of heads exactly; of a resource, of all plans that need no more than this one."""
    costs, shape = random_costs(random.Random(seed)), HeadShape(16, 8, causal=True)
    suggestion = Suggestion.of_heads(KINDS, costs, 1.0, shapes={0: shape, 1: shape})
    for count in range(1, 5):
        plan = suggestion.at(count)
        cheapest = min(all_plans(costs, [0, 1, 1, 1]), key=lambda entry: (entry[0] != count, entry[1]))
        assert choices_of(plan) == cheapest[3] and plan.size_of(count) == count
    for resource in ("cache", "multiply_adds"):
        measure: Any = (
            multiply_adds if resource == "multiply_adds" else lambda kind, *rest: cached_numbers([kind], *rest)
        )
        needs = [measure(kind, shape, LENGTH) for kind in (STOCK_HEAD, *KINDS)]
        plans = all_plans(costs, needs)
        steps = {}
        for percent in range(99, 30, -1):
            if min(needs) > needs[0] * percent / 100:
                break
            plan = suggestion.at({resource: percent / 100, "length": LENGTH})
            choices = choices_of(plan)
            _, cost, need, _ = next(entry for entry in plans if entry[3] == choices)
            assert need <= 4 * needs[0] * percent / 100
            assert plan.share(resource, LENGTH) == pytest.approx(need / (4 * needs[0]))
            assert cost <= min(entry[1] for entry in plans if entry[2] <= need) + 1e-12
            steps[choices] = need
        nested = list(steps)
        assert len(nested) > 3  # each plan goes on from the one before: no head needs more again
        for before, after in itertools.pairwise(nested):
            assert all(needs[b] >= needs[a] for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_pairs_are_those_that_the_formulas_name(causal: bool, length: int) -> None:
    def seen(near: int, sinks: int, own: int = length) -> int:
        pairs = ((i, j) for i in range(length) for j in range(length) if j <= i or not causal)
        return sum(abs(i - j) < min(near, own) or (j < sinks and abs(i - j) >= near) for i, j in pairs)

    shape = HeadShape(16, 8, causal=causal)
    assert visible_pairs(STOCK_HEAD, shape, length) == seen(length, 0)
    assert visible_pairs(STOCK_HEAD, HeadShape(16, 8, causal=causal, window=3), length) == seen(3, 0)
    for window, sinks in ((1, 0), (3, 2), (20, 4)):
        config = SynthesizerConfig("dot_product", window=window, sinks=sinks)
        assert visible_pairs(config, shape, length) == seen(window, sinks)
    relative = SynthesizerConfig("relative", max_distance=3, sinks=2)
    sums = 2 * length * (1 if causal else 2) if length > 3 else 0
    assert visible_pairs(relative, shape, length) == seen(3, 2 if length > 3 else 0) + sums


@pytest.mark.parametrize(
    "config",
    [
        SynthesizerConfig("dot_product"),
        SynthesizerConfig("random"),
        SynthesizerConfig("dense"),
        SynthesizerConfig("factorized_random", rank=3),
        SynthesizerConfig("factorized_dense"),
        SynthesizerConfig("relative_dense", max_distance=16),
        SynthesizerConfig("dense+dot_product"),
        SynthesizerConfig("lsh_simple"),
    ],
    ids=lambda config: config.variant,
)
def test_multiply_adds_are_those_that_torch_counts(config: SynthesizerConfig) -> None:
    length, heads = 10, 2
    synthesizer = build_synthesizer(config, 16, heads, length)
    values = torch.randn(1, heads, length, 8)

    class Whole(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            logits = synthesizer(states)
            return logits.materialize() @ values

    found = heads * multiply_adds(config, HeadShape(16, 8), length)
    if config.variant == "lsh_simple":  # counted as one that sees all keys
        assert found == heads * length * (16 * 8 + 9 * 0 + 2 * 8 * length)
    else:
        assert 2 * found == count_flops(Whole(), torch.randn(1, length, 16))


def test_the_cache_of_heads_is_that_of_the_model() -> None:
    shape = HeadShape(32, 8, 2, True)
    stock = causal_model("llama")
    assert 2 * 2 * cached_numbers([STOCK_HEAD] * 2, shape, 9) * 4 == cost_report(stock, [9]).costs[0].cache_bytes
    model = patch_model(stock, "random")
    values = 2 * 2 * cached_numbers([KINDS[2]] * 2, shape, 9) * 4
    assert values + 2 * 2 * 9 * 4 == cost_report(model, [9]).costs[0].cache_bytes  # keys of width one count the tokens
    window, relative, salience = KINDS[1], KINDS[0], SynthesizerConfig("relative+salience", max_distance=2, sinks=0)
    assert cached_numbers([window, window], shape, 100) == (3 + 1) * 2 * 8
    assert cached_numbers([window, STOCK_HEAD], shape, 100) == 100 * 2 * 8
    assert cached_numbers([window, relative], shape, 100) == 4 * 2 * 8
    assert cached_numbers([relative, relative], shape, 100) == (2 + 1 + 1) * 8
    assert cached_numbers([salience, salience], shape, 100) == 3 * 8 + 2 * 3 * 1
    assert cached_numbers([relative], shape, 3) == 3 * 8
    assert cached_numbers([STOCK_HEAD], HeadShape(32, 8, 1, True, window=5), 100) == 5 * 2 * 8
    assert cached_numbers([STOCK_HEAD], HeadShape(32, 8), 100) == 0


def test_a_menu_measures_each_kind_and_the_plan_as_it_is_patched() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    suggestion = suggest_heads(
        teacher, batches, variants=["relative", WINDOW, KINDS[2]], budget=[2, PRODUCTS, 0.5, 2], progress=False
    )
    budget = ResourceBudget("multiply_adds", 0.6, LENGTH)
    assert list(suggestion.curve) == [2, 3, budget] and suggestion.budget == 2  # BERT has six heads
    for number, (kind, costs) in enumerate(suggestion.menu):
        alone = suggest_heads(teacher, batches, kind, budget=2, progress=False)
        assert alone.menu == [] and alone.variant == kind and alone.costs.keys() == costs.keys()
        assert all(alone.costs[layer] == pytest.approx(row, rel=1e-4) for layer, row in costs.items())
        assert number or suggestion.variant == kind
    assert suggestion.costs[0] == [min(row) for row in zip(*(costs[0] for _, costs in suggestion.menu), strict=True)]
    for size, change in suggestion.curve.items():
        plan = suggestion.at(size)
        student = patch_model(copy.deepcopy(teacher), plan)
        transfer_attention(student, teacher, batches, method="average", progress=False)
        with torch.no_grad(), observing(teacher, student):
            ours, theirs = ([answers_of(model, inputs) for inputs in batches] for model in (student, teacher))
        found = sum((a - b).square().sum() for a, b in zip(ours, theirs, strict=True)) / sum(
            b.square().sum() for b in theirs
        )
        assert change == pytest.approx(found.item(), rel=2e-2, abs=1e-7)
    assert suggestion.at(PRODUCTS).share("multiply_adds", LENGTH) <= 0.6


def test_heads_that_share_a_key_get_one_kind() -> None:
    teacher = causal_model("llama")
    batches = [{"input_ids": torch.randint(3, 64, (3, LENGTH))} for _ in range(2)]
    suggestion = suggest_heads(teacher, batches, [RELATIVE, WINDOW], budget=[CACHE, 0.5], progress=False)
    assert suggestion.shared == {0: 2, 1: 2} and suggestion.shapes[0] == HeadShape(32, 8, 2, True, None, MAX_LENGTH)
    for share in (0.8, 0.5, 0.4, 0.3):
        plan = suggestion.at({**CACHE, "cache": share})
        assert plan.share("cache", LENGTH) <= share
        for heads in plan.heads_by_kind.values():
            assert all(2 * (head // 2) in row and 2 * (head // 2) + 1 in row for row in heads.values() for head in row)
        model = patch_model(copy.deepcopy(teacher), plan)
        with torch.no_grad():
            assert torch.isfinite(model(**batches[0]).logits).all()
    plan[0] = SynthesizerConfig(
        "dot_product", window=3, sinks=1, heads=[0]
    )  # by hand: its neighbour still needs every key
    del plan[1]
    assert plan.share("cache", LENGTH) == 1.0
    free = suggest_heads(teacher, batches, [RELATIVE, WINDOW], budget=0.5, whole_keys=False, progress=False)
    assert free.at({**PRODUCTS, "multiply_adds": 0.8}).share("multiply_adds", LENGTH) <= 0.8
    with pytest.raises(InvalidConfigError, match="2 heads to a key.* whole_keys=False"):
        free.at(CACHE)


def test_a_cache_is_that_of_the_decoder_and_works_in_one_plan_with_an_encoder() -> None:
    teacher, batches = sharp(HEADS["t5"]), loader(HEADS["t5"])
    cache = {"cache": 0.5, "length": 64}
    suggestion = suggest_heads(teacher, batches, [RELATIVE, WINDOW], budget=[0.9, cache], progress=False)
    assert suggestion and all(layer.startswith("decoder") for layer in suggestion)
    assert suggestion.share("cache", 64) <= 0.5 and suggestion.share("multiply_adds", 64) < 1
    model = patch_model(copy.deepcopy(teacher), suggestion.at(0.9))
    assert model.config.synthesizer["layers"].keys() == {"encoder", "decoder"}


def test_a_hybrid_with_windows_returns_its_weights() -> None:
    """Groups with a window and without: weights of the first are zero outside, and those of stock heads are stock's."""
    model = build("BertModel")
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 32, (2, 9))
    stock = model(input_ids=ids, output_attentions=True).attentions[0]
    groups = [SynthesizerConfig("dot_product", window=2, sinks=1, heads=[0]), SynthesizerConfig("random", heads=[2])]
    weights = patch_model(model, {0: groups})(input_ids=ids, output_attentions=True).attentions[0]
    places = torch.arange(9)
    seen = ((places[:, None] - places).abs() < 2) | (places == 0)
    assert weights[:, 0, ~seen].eq(0).all() and weights[:, 0, seen].gt(0).all()
    torch.testing.assert_close(weights[:, 1], stock[:, 1])


def made_up(budget: Any = CACHE) -> Suggestion:
    shape = HeadShape(16, 8, causal=True)
    curve = {2: 0.01, ResourceBudget("cache", 0.5, LENGTH): 0.02}
    costs = [{0: [0.1, 0.4], 1: [0.3, 0.2]}, {0: [0.2, 0.1], 1: [0.3, 0.1]}, {0: [0.5, 0.6], 1: [0.01, 0.9]}]
    return Suggestion.of_heads(KINDS, costs, budget, curve, shapes={0: shape, 1: shape})


def test_a_menu_prints_is_edited_and_travels(tmp_path: Path) -> None:
    suggestion = made_up(3)
    assert suggestion == {
        0: [KINDS[0].replace(heads=[0]), KINDS[1].replace(heads=[1])],
        1: KINDS[2].replace(heads=[0]),
    }
    assert suggestion.order == [(1, 0), (0, 0), (0, 1), (1, 1)]
    printed = str(suggestion)
    assert "b: 1 of 4 heads get dot_product (window=3, sinks=1)" in printed
    assert "1 of 4 heads keep stock attention" in printed and "2 of 2 a:1 b:1" in printed
    assert "cache" in printed and "50.0%  0.0200" in printed and "50%  0.0100" in printed
    assert [line.split() for line in suggestion.picture().splitlines()] == [["0", "a", "b"], ["1", "c", "█"]]
    suggestion[1] = "dense"
    assert [line.split() for line in suggestion.picture().splitlines()] == [["0", "a", "b"], ["1", "d", "d"]]
    for plan in (made_up(), made_up(3), made_up(0.5)):
        plan.save(tmp_path / "menu.json")
        again = Suggestion.load(tmp_path / "menu.json")
        assert again == plan and again.menu == plan.menu and again.costs == plan.costs and again.curve == plan.curve
        assert again.budget == plan.budget and again.shapes == plan.shapes and str(again) == str(plan)
        assert ("of stock's bytes of the cache at 12 tokens" in str(plan)) is (
            plan.budget == ResourceBudget("cache", 0.5, LENGTH)
        )
        assert again.at(CACHE) == plan.at(CACHE) and again.at(4) == plan.at(4)
    model = patch_model(causal_model("gpt2"), made_up())
    assert torch.isfinite(model(input_ids=torch.randint(3, 64, (2, LENGTH))).logits).all()


def test_a_menu_from_a_broken_json_is_refused() -> None:
    for name, value in (
        ("menu", [[{"variant": "random"}, [[0, [0.1]]]]]),
        ("menu", [[{"variant": "nothing"}, [[0, [0.1, 0.2]], [1, [0.1, 0.2]]]]]),
        ("shapes", [[0, {"hidden_size": 16, "head_dim": 8}]]),
        ("shapes", [[0, {"hidden_size": 16, "head_dim": -8}], [1, {"hidden_size": 16, "head_dim": 8}]]),
        ("shapes", [[0, {"width": 16}], [1, {}]]),
        ("budget", {"cache": 2, "length": 8}),
        ("curve", [[{"cache": 0.5}, 0.1]]),
    ):
        data = json.loads(json.dumps(made_up().to_dict()))
        with pytest.raises(InvalidConfigError):
            Suggestion.from_dict({**data, name: value})


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([], "menu of variants is empty"),
        (["random", "relative", "random"], "names random twice"),
        ([WINDOW, SynthesizerConfig(**WINDOW)], r"names dot_product \(window=3, sinks=1\) twice"),
        ([SynthesizerConfig("random", heads=[0]), "relative"], "suggest_heads chooses the heads"),
        ([{"window": 3}], "a dict with a 'variant'"),
        (None, "Name the new attention once"),
    ],
)
def test_a_menu_that_cannot_be(variants: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        suggest_heads(build(HEADS["bert"]), [], variants)


def test_a_kind_that_the_model_cannot_take_is_refused_first() -> None:
    with pytest.raises(UnsupportedModelError, match="'routing' chooses its keys over the whole sequence"):
        suggest_heads(causal_model("gpt2"), [], ["random", "routing"])
    with pytest.raises(InvalidConfigError, match="Name the new attention once"):
        suggest_heads(causal_model("gpt2"), [], "random", variants=["relative"])


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"cache": 0.3}, "and a length in tokens"),
        ({"cache": 1.3, "length": 8}, "a share below 1"),
        ({"cache": 1, "length": 8}, "a share below 1"),
        ({"cache": 0.5, "length": 0}, "a length in tokens"),
        ({"cache": 0.5, "multiply_adds": 0.5, "length": 8}, "names one of cache and multiply_adds"),
        ({"memory": 0.5, "length": 8}, "names one of cache and multiply_adds"),
        ({"cache": 0.01, "length": LENGTH}, "in all heads this model needs .*Name a larger share"),
        ({"cache": 0.5, "length": 10**5}, "random ends at max_length="),
        ([0.5, {"cache": 0.3}], "and a length in tokens"),
    ],
)
def test_a_budget_of_a_resource_that_cannot_be(budget: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        suggest_heads(causal_model("gpt2"), [], KINDS, budget)
    with pytest.raises(InvalidConfigError, match="no causal layer, and so no cache"):
        suggest_heads(build(HEADS["bert"]), [], KINDS, CACHE)
    with pytest.raises(InvalidConfigError, match="does not know the sizes"):
        Suggestion.of_heads(KINDS[0], {0: [0.1, 0.2]}, CACHE)
