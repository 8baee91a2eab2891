"""Layers whose heads differ: each head as its own formula says, whatever stands beside it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from hf_synthesizer import (
    InvalidConfigError,
    SynthesizerAttention,
    SynthesizerConfig,
    patch_model,
    patch_report,
    unpatch_model,
)
from hf_synthesizer.attend import attend
from hf_synthesizer.checkpoints.model_card import model_card
from hf_synthesizer.logits.masks import AttentionMask
from tests.helpers import naive
from tests.helpers.models import build, mask, randomize
from tests.helpers.problems import TOLERANCE

HEADS, WIDTH, N = 6, 24, 12
LAYERS: dict[str, list[tuple[str, list[int]]]] = {
    "one group": [("random", [0, 3, 4])],
    "neighbours": [("random+salience", [2, 3])],
    "several": [("factorized_random", [5]), ("dense+salience", [0, 2]), ("random", [1, 4])],
    "no stock": [("factorized_dense", [1, 2, 3]), ("dense", [0, 5]), ("salience", [4])],
    "stock named": [("dot_product", [0, 1]), ("fixed_random", [4])],
    "mixtures": [("random+dot_product", [0, 5]), ("random+dense", [3])],
}
"""Variants and their heads. What no group names is stock."""
MASKS = ("none", "right", "left", "full", "causal", "causal-left", "scattered", "position")


def spec(groups: list[tuple[str, list[int]]], **options: Any) -> list[SynthesizerConfig]:
    return [SynthesizerConfig(variant, heads=heads, **options) for variant, heads in groups]


def recipes(layer: SynthesizerAttention) -> dict[int, tuple[str, dict[str, np.ndarray], int, int]]:
    """For each head its variant, the tensors that make it, its place in them, and how many heads they are for."""
    made = {}
    for _, heads, group in layer.synthesizer.members():
        state = {name: tensor.double().numpy() for name, tensor in group.state_dict().items()}
        made |= {head: (group.config.variant, state, place, len(heads)) for place, head in enumerate(heads)}
    return made


def logits_of_each_head(layer: SynthesizerAttention, row: np.ndarray) -> np.ndarray:
    """(H, L, L), one head after the other, from the formulas."""
    made = recipes(layer)
    assert sorted(made) == list(range(layer.num_heads))
    options = {"scaling": layer.synthesizer.head_dim**-0.5}
    return np.stack(
        [naive.logits(v, s, row, count, **options)[place] for _, (v, s, place, count) in sorted(made.items())]
    )


@pytest.mark.parametrize("hidden", MASKS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_head_is_what_its_own_formula_says(name: str, hidden: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, spec(LAYERS[name]), N).double())
    for length in (1, 5, N):
        states = torch.randn(3, length, WIDTH, dtype=torch.float64)
        keep = mask(3, length, hidden.removeprefix("causal-")).bool()[:, None, None, :]
        bias = torch.randn(1, HEADS, length, length, dtype=torch.float64) if hidden == "position" else None
        if hidden == "scattered":
            keep = torch.rand(3, 1, length, length) > 0.4
        given = AttentionMask(None if hidden in ("none", "causal") else keep, bias, 0 if "causal" in hidden else None)
        seen = keep.expand(3, 1, length, length) & (
            torch.ones(length, length).tril().bool() | ("causal" not in hidden)
        )
        value = torch.randn(3, HEADS, length, 4, dtype=torch.float64)
        with torch.no_grad():
            fast, _ = attend(layer.synthesizer(states), value, given)
            exact, weights = attend(layer.synthesizer(states), value, given, need_weights=True)
        for row in range(3):
            scores = logits_of_each_head(layer, states[row].numpy()) + (0.0 if bias is None else bias[0].numpy())
            scores = np.where(seen[row].numpy(), scores, -np.inf)
            expected, output = naive.attention(scores, value[row].numpy(), np.ones(length, dtype=bool))
            torch.testing.assert_close(weights[row], torch.from_numpy(expected), rtol=1e-6, atol=1e-9)
            for found in (fast, exact):
                found = found[row].transpose(0, 1).flatten(1)
                torch.testing.assert_close(found, torch.from_numpy(output), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [7, 40, 300])
def test_routes_of_groups_equal_the_reference_forward_and_backward(length: int, dtype: torch.dtype) -> None:
    layer = SynthesizerAttention(WIDTH, HEADS, spec(LAYERS["several"]), 300).to(dtype)
    states = torch.randn(2, length, WIDTH, dtype=dtype, requires_grad=True)
    keep = mask(2, length, "right")
    results = []
    for need_weights in (False, True):
        layer.zero_grad()
        states.grad = None
        output, _ = layer(states, keep, need_weights=need_weights)
        output.float().pow(2).sum().backward()
        results.append([output, states.grad, *(parameter.grad for parameter in layer.parameters())])
    for fast, exact in zip(*results, strict=True):
        scale = exact.abs().max().item() + 1e-3
        torch.testing.assert_close(fast, exact, rtol=0, atol=5 * TOLERANCE[dtype] * max(scale, 1.0))


@pytest.mark.parametrize("variant", ["sparse_strided", "sparse_fixed", "lsh_simple", "routing"])
def test_variants_that_choose_keys_have_heads_of_their_own(variant: str) -> None:
    layer = SynthesizerAttention(WIDTH, HEADS, spec([(variant, [0, 2, 5]), ("random", [1])]), 40).eval()
    states = torch.randn(2, 40, WIDTH)
    with torch.no_grad():
        found, weights = layer(states)
        own = attend(layer.synthesizer.groups["0"](states), torch.randn(2, 3, 40, 4), need_weights=True)[1]
        assert torch.equal(weights[:, [0, 2, 5]], own)
        torch.testing.assert_close(layer(states, need_weights=False)[0], found, rtol=1e-4, atol=1e-5)


# ---- what a user asks for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [[], [-1], [0, 0], [True], [0.5], "01", 3, {0: 1}], ids=str)
def test_heads_that_cannot_be(heads: Any) -> None:
    with pytest.raises(InvalidConfigError, match="heads must be a list of heads, counted from 0, each once"):
        SynthesizerConfig("random", heads=heads)


def test_groups_that_do_not_fit_a_layer_are_refused_and_change_nothing() -> None:
    model = build("BertModel")
    before = {name: type(module) for name, module in model.named_modules()}
    for asked, message in [
        (spec([("random", [0, 3])]), "'encoder.0'.*names head 3, but the layer has 3, 0 to 2"),
        (spec([("random", [0, 1]), ("dense", [1])]), "Head 1 is named twice.*'random' and by 'dense'"),
        ([SynthesizerConfig("random"), SynthesizerConfig("dense", heads=[0])], "'random' does not say which"),
        ([], "at least one"),
        (["random"], "a list of SynthesizerConfig"),
    ]:
        with pytest.raises(InvalidConfigError, match=message):
            patch_model(model, {0: asked})
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_all_heads_of_one_variant_are_the_plain_variant() -> None:
    model = patch_model(build("BertModel"), SynthesizerConfig("dense", heads=[2, 0, 1]))
    assert model.config.synthesizer == patch_model(build("BertModel"), "dense").config.synthesizer


def test_options_reach_the_groups_that_know_them() -> None:
    groups = {0: spec([("factorized_random", [0]), ("random+dense", [1])]), 1: "random"}
    model = patch_model(build("BertModel"), groups, rank=3, mixing="sum", max_length=20)
    config = model.encoder.layer[0].attention.self.synthesizer.config
    assert [(group.options.get("rank"), group.mixing, group.max_length) for group in config.groups] == [
        (3, "softmax", 20),
        (None, "sum", 20),
    ]
    short = patch_model(build("BertModel"), "random", heads=[1])
    assert short.encoder.layer[1].attention.self.synthesizer.config.stock_heads == (0, 2)


def test_the_report_and_the_card_name_the_heads() -> None:
    model = patch_model(build("BertModel"), {1: spec([("random", [0]), ("dense", [2])])})
    report = patch_report(model)
    [layer] = report.swapped
    assert layer.variant == "random [0]; dense [2]" and "stock_heads=1" in layer.note
    assert report.parameters_before == patch_report(unpatch_model(copy.deepcopy(model))).parameters_after
    model = patch_model(build("BertModel"), {1: spec([("random", [0]), ("dense", [2])])})
    card = model_card(model, repo_id="me/it")
    assert "heads 1: the stock attention" in card and "- dense\n" in card
