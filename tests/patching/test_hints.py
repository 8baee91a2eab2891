"""What patch_model says to somebody who calls it with something else than a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertModel

from hf_synthesizer import NotPatchedError, UnknownVariantError, UnsupportedModelError, patch_model, unpatch_model
from tests.helpers.models import bert_config, build


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.auto_model = build("BertModel")


class SentenceTransformer(nn.Sequential):
    """As the library of that name builds it: a series of modules, the first of which holds the model."""

    max_seq_length = 512


class OwnClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = build("BertModel")
        self.head = nn.Linear(24, 2)


THINGS: dict[str, tuple[Any, str]] = {
    "a SentenceTransformer of two models": (
        lambda: SentenceTransformer(Transformer(), Transformer()),
        r"not on SentenceTransformer\..*patch_model\(model\[0\]\.auto_model, …\).*model\.max_seq_length",
    ),
    "a module of one's own": (OwnClassifier, r"Patch the model in it: patch_model\(model\.backbone, …\)\.$"),
    "an encoder": (lambda: build("BertModel").encoder, "not on BertEncoder.*part of a model.*the model that holds it"),
    "a layer": (lambda: build("BertModel").encoder.layer[0], "not on BertLayer.*choose layers by layers="),
    "a class": (lambda: BertModel, r"not on the class BertModel.*patch_model\(BertModel\.from_pretrained"),
    "an auto class": (lambda: AutoModel, r"not on the class AutoModel.*from_pretrained_patched\(\)"),
    "a name": (lambda: "bert-base-uncased", r"from_pretrained_patched\('bert-base-uncased'"),
    "a config": (bert_config, r"AutoModel\.from_config\(config\)"),
    "a wrapped model": (lambda: nn.DataParallel(build("BertModel")), r"\(module\) before it is wrapped"),
    "a compiled model": (lambda: torch.compile(build("BertModel")), r"\(_orig_mod\) before it is wrapped"),
    "nothing": (lambda: None, r"not on NoneType\.$"),
    "a module without a model": (lambda: nn.Linear(2, 2), r"not on Linear\.$"),
}


@pytest.mark.parametrize("what", THINGS)
def test_something_that_is_no_model(what: str) -> None:
    make, message = THINGS[what]
    with pytest.raises(UnsupportedModelError, match=message):
        patch_model(make(), "random")


def test_the_way_that_is_named_works() -> None:
    model = SentenceTransformer(Transformer(), Transformer())
    patch_model(model[0].auto_model, "random", max_length=12)
    assert type(model[0].auto_model).__name__ == "SynthesizerBertModel"


@pytest.mark.parametrize(("before", "after"), [(512, 12), (None, 12), (8, 8)])
def test_a_sentence_transformer_is_patched_and_its_longest_text_follows(before: Any, after: int) -> None:
    model = SentenceTransformer(Transformer(), nn.Identity())
    model.max_seq_length = before
    assert patch_model(model, "random", max_length=12) is model
    assert type(model[0].auto_model).__name__ == "SynthesizerBertModel" and model.max_seq_length == after
    assert unpatch_model(model) is model
    assert type(model[0].auto_model) is BertModel and model.max_seq_length == before
    with pytest.raises(NotPatchedError):
        unpatch_model(model)
    with pytest.raises(UnknownVariantError):
        patch_model(model, "rando", max_length=12)
    assert model.max_seq_length == before
