"""How often a patched model asks its device anything: each time, the host waits for all that was launched."""

from __future__ import annotations

import pytest
import torch

from hf_synthesizer import patch_model
from hf_synthesizer.attend import as_accelerator
from tests.helpers.device_reads import Questions
from tests.helpers.models import VARIANTS, batch, build, decoder

LAYERS = 4
ENCODERS = ("BertModel", "T5EncoderModel")
FEW = (*VARIANTS, "sparse_fixed", "dense+random+salience")


def deep(head: str):
    return build(head, **{"num_hidden_layers" if head.startswith("Bert") else "num_layers": LAYERS})


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("variant", FEW)
@pytest.mark.parametrize("head", ENCODERS)
def test_a_step_of_training_asks_at_most_twice(head: str, variant: str, padding: str) -> None:
    """One of the two is Transformers' own: whether a batch has padding at all."""
    model = patch_model(deep(head), variant).train()
    with as_accelerator(), Questions() as device_reads:
        for _ in range(2):
            inputs = batch(head, 8, padding)
            before = device_reads.count
            model(**inputs)[0].sum().backward()
            assert device_reads.count - before <= 2, device_reads.places[before:]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("variant", FEW)
@pytest.mark.parametrize("head", ENCODERS)
def test_an_evaluation_asks_at_most_twice(head: str, variant: str, padding: str) -> None:
    model = patch_model(deep(head), variant)
    with as_accelerator(), Questions() as device_reads, torch.no_grad():
        for _ in range(3):
            inputs = batch(head, 8, padding)
            before = device_reads.count
            model(**inputs)
            assert device_reads.count - before <= 2, device_reads.places[before:]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "variant", ["random", "random+dot_product", "factorized_dense", "dense+salience", "sparse_strided"]
)
@pytest.mark.parametrize("model_type", ["bert", "t5"])
def test_decoding_asks_at_most_once_a_token(model_type: str, variant: str, padding: str) -> None:
    stock, model = decoder(model_type), decoder(model_type)
    patch_model(model, variant)
    inputs = batch("BertModel", 6, padding)

    def asked(model, tokens: int) -> int:
        with as_accelerator(), Questions() as device_reads:
            model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return device_reads.count

    for tokens in (1, 6):
        assert asked(model, tokens) - asked(stock, tokens) <= tokens
