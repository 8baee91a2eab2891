"""Patched models learn: the gradient reaches every parameter, and 32 examples can be learnt by heart."""

from __future__ import annotations

import pytest
import torch

from hf_synthesizer import patch_model
from tests.helpers.models import MIXTURES, VARIANTS, build, randomize

STEPS = 500
"""At most; most variants need a fifth."""


@pytest.mark.parametrize(
    ("variant", "options"),
    [*((variant, {}) for variant in VARIANTS), *((variant, {"mixing": "sum"}) for variant in MIXTURES)],
    ids=str,
)
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_the_gradient_reaches_every_synthesizer_parameter(variant: str, options: dict, head: str) -> None:
    model = patch_model(
        build(head, **({} if head.startswith("T5") else {"initializer_range": 0.1})), variant, **options
    )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(2, 64, (4, 24))
    labels = ids if head.startswith("T5") else torch.tensor([0, 1, 0, 1])
    for _ in range(2):  # parts that start at zero pass the gradient on from the second step
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if ".synthesizer." in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_a_patched_model_overfits_32_examples(variant: str, head: str) -> None:
    """The labels follow from nothing but the single tokens' places and kinds, in random order."""
    small = {} if head.startswith("T5") else {"initializer_range": 0.05, "hidden_dropout_prob": 0.0}
    rates = {"dropout_rate": 0.0} if head.startswith("T5") else {"attention_probs_dropout_prob": 0.0}
    model = patch_model(build(head, **small, **rates), variant).train()
    if head.startswith("T5"):
        randomize(model, std=0.1)
    ids = torch.randint(2, 64, (32, 8))
    if head.startswith("T5"):
        labels = torch.stack([ids[:, 0], torch.randint(2, 64, (32,))], dim=1)
    else:
        labels = torch.randint(0, 2, (32,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    right = 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(input_ids=ids, labels=labels)  # without dropout: what it says in eval mode too
        right = (out.logits.argmax(-1) == labels).float().mean().item()
        if right == 1.0:
            break
        out.loss.backward()
        optimizer.step()
    assert right > 0.95, out.loss.item()
