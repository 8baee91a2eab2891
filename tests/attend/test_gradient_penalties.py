"""Gradients of gradients (`create_graph=True`) go through every route that has a backward of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_synthesizer.attend as attention
from hf_synthesizer import patch_model
from hf_synthesizer.attend import ROUTES, chunked, reference
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.device import matmul
from tests.helpers.models import CHOOSING, VARIANTS, build, mask, randomize
from tests.helpers.problems import leaves, make_logits, make_mask

FORMS = (
    ["static"],
    ["static_product", "salience"],
    ["low_rank"],
    ["low_rank_shared"],
    ["tiled"],
    ["explicit", "biased"],
)


def penalty(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a gradient penalty."""
    first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    total = sum(gradient.square().sum() for gradient in first)
    return [*first, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("hidden", ["none", "causal", "right", "scattered", "position"])
@pytest.mark.parametrize("names", FORMS, ids="+".join)
def test_the_chunked_and_the_static_route_equal_the_reference(names: list[str], hidden: str) -> None:
    torch.manual_seed(0)
    logits = make_logits(names, True, 2, 3, 5, 5, dtype=torch.float64)
    value = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    attention_mask = make_mask(hidden, 2, 3, 5, 5, torch.float64)
    inputs = [value, *leaves(logits)]
    expected = penalty(reference.reference_attention(logits, value, attention_mask)[0], inputs)
    for name in ("static", "chunked"):
        terms, route = Terms.of(logits, attention_mask), ROUTES[name]
        if name == "static" and not route.serves(terms, value, attention_mask, 0.0):
            continue
        for actual, gradient in zip(
            penalty(route.attention(terms, value, attention_mask), inputs), expected, strict=True
        ):
            torch.testing.assert_close(actual, gradient, rtol=1e-8, atol=1e-8)


def test_dropout_is_the_same_in_the_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    logits = make_logits(["low_rank"], False, 2, 3, 5, 5, dtype=torch.float64)
    value = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    attention_mask = make_mask("right", 2, 3, 5, 5, torch.float64)
    output = chunked.chunked_attention(Terms.of(logits, attention_mask), value, attention_mask, 0.4)
    plain = torch.autograd.grad(output.sum(), [value, logits.query], retain_graph=True)
    recorded = torch.autograd.grad(output.sum(), [value, logits.query], create_graph=True)
    for actual, expected in zip(recorded, plain, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_projections(bias: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(192, 160, bias=bias), torch.randn(3, 40, 192, requires_grad=True)
    assert matmul._worth_it(x, 160) == (matmul._LINEAR is not None)
    inputs = [x, *module.parameters()]
    for actual, expected in zip(
        penalty(matmul.linear(module, x).tanh(), inputs), penalty(module(x).tanh(), inputs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("variant", [None, *VARIANTS, *CHOOSING])
def test_a_gradient_penalty_on_a_model(variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under eager, as stock: torch's kernel behind sdpa has no second derivative."""
    for module, name in ((matmul, "_SMALL"), (attention, "FEW_LOGITS"), (attention, "FEW_TILED_LOGITS")):
        monkeypatch.setattr(module, name, 0)  # the way of larger models
    model = build("BertModel") if variant is None else patch_model(build("BertModel"), variant)
    model.set_attn_implementation("eager")
    embedded = randomize(nn.Linear(24, 40)).weight.detach().view(2, 20, 24).requires_grad_()
    output = model(inputs_embeds=embedded, attention_mask=mask(2, 20, "right")).last_hidden_state
    *_, second = penalty(output, [embedded])
    assert second.isfinite().all() and second.abs().max() > 0


@pytest.mark.parametrize(
    "variant", ["random", "random+salience", "dense", "factorized_dense", "factorized_random+dot_product"]
)
def test_a_gradient_penalty_is_the_same_by_every_route(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(patch_model(build("BertModel"), variant), std=0.2)
    embedded = torch.randn(2, 20, 24, requires_grad=True)
    actual = []
    for backend in ("eager", "sdpa"):
        for module, name in ((matmul, "_SMALL"), (attention, "FEW_LOGITS"), (attention, "FEW_TILED_LOGITS")):
            monkeypatch.setattr(module, name, 0)
        model.set_attn_implementation(backend)
        output = model(inputs_embeds=embedded, attention_mask=mask(2, 20, "right")).last_hidden_state
        actual.append(penalty(output, [embedded]))
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
