"""What a patch shares with other models, what `unpatch_model` gives back, and when it warns."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, logging

from hf_synthesizer import patch_model, unpatch_model
from tests.helpers.models import batch, build, first_output, randomize


def run(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return first_output(model.eval()(**inputs))


def configs(model: nn.Module) -> dict[str, Any]:
    """Every config that some module of the model refers to."""
    found = {name: getattr(module, "config", None) for name, module in model.named_modules()}
    return {name: config for name, config in found.items() if isinstance(config, PreTrainedConfig)}


@pytest.mark.parametrize("head", ["BertModel", "BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_models_that_share_a_config_are_patched_one_by_one(tmp_path: Path, head: str) -> None:
    model, inputs = build(head), batch(head)
    config, generation = model.config, getattr(model, "generation_config", None)
    before, objects = config.to_dict(), configs(model)
    sibling = type(model)(config)

    patch_model(model, "dense", layers=[0])
    assert sibling.config is config and config.to_dict() == before and not hasattr(config, "synthesizer")
    assert model.config is not config and model.config.synthesizer and type(model.config) is not type(config)
    own = configs(model)
    # Who referred to the shared object refers to the model's own; T5's stacks have copies of theirs, which nobody shares.
    assert own.keys() == objects.keys() and all(
        own[name] is model.config for name, found in objects.items() if found is config
    )
    assert getattr(model, "generation_config", None) is generation
    twin = copy.deepcopy(model)
    assert not {id(found) for found in configs(twin).values()} & {id(found) for found in own.values()}

    sibling.save_pretrained(tmp_path)
    assert torch.equal(run(type(sibling).from_pretrained(tmp_path), inputs), run(sibling, inputs))
    before = config.to_dict()  # saving writes down dtype and architecture
    model.save_pretrained(tmp_path)
    assert unpatch_model(model).config is config and config.to_dict() == before
    assert all(found is objects[name] for name, found in configs(model).items())


def test_what_is_set_on_a_patched_model_stays_when_it_is_unpatched(tmp_path: Path) -> None:
    model = patch_model(build("BertForMaskedLM"), "dense")
    model.resize_token_embeddings(80)
    unpatch_model(model).save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.vocab_size == 80


def warnings_of(caplog: pytest.LogCaptureFixture, action: Callable[[], Any]) -> list[str]:
    logging.enable_propagation()
    action()
    logging.disable_propagation()
    return [record.getMessage() for record in caplog.records]


def train_a_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(**batch("BertModel")).last_hidden_state.square().mean().backward()
    optimizer.step()


TRAINED: dict[str, Callable[[Any], Any]] = {
    "a step of an optimizer": train_a_step,
    "an edit of the data": lambda model: model.encoder.layer[1].attention.self.value.weight.data.mul_(2.0),
    "other weights": lambda model: model.load_state_dict(randomize(copy.deepcopy(model)).state_dict()),
    "an output projection": lambda model: randomize(model.encoder.layer[0].attention.output.dense),
}


@pytest.mark.parametrize("change", TRAINED.values(), ids=TRAINED)
def test_unpatching_a_trained_model_warns(caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any]) -> None:
    model = patch_model(build("BertModel"), "dense")
    change(model)
    said = warnings_of(caplog, lambda: unpatch_model(model))
    assert len(said) == 1 and re.search("weights of this model have changed since.*queries and keys", said[0])


UNTRAINED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a forward pass": lambda model: model(**batch("BertModel")),
    "a trained synthesizer": lambda model: randomize(model.encoder.layer[0].attention.self.synthesizer),
    "a cast": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", UNTRAINED.values(), ids=UNTRAINED)
def test_unpatching_an_untrained_model_is_silent(
    caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any]
) -> None:
    model = patch_model(build("BertModel"), "dense")
    change(model)
    assert not warnings_of(caplog, lambda: unpatch_model(model))


@pytest.mark.parametrize("variant", ["dense", "dot_product"])
def test_what_comes_back_after_training(variant: str) -> None:
    model = build("BertModel")
    stock = copy.deepcopy(model.state_dict())
    patch_model(model, variant)
    train_a_step(model)
    trained = copy.deepcopy(model.state_dict())
    for name, tensor in unpatch_model(model).state_dict().items():
        if re.search(r"attention\.self\.(query|key)\.weight", name):
            assert torch.equal(tensor, stock[name]) == (variant == "dense"), name
        else:
            assert name not in trained or torch.equal(tensor, trained[name]), name
