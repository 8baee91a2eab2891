"""Patching and saving do their work once: synthesizers are built once, classes made when needed, attention layers found once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_synthesizer import RandomSynthesizer, patch_model
from hf_synthesizer.layers.finding import attention_layers
from tests.helpers.models import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models through which `find_attention_layers` has walked."""
    models: list[Any] = []
    find_model_type = attention_layers.model_type_of

    def model_type_of(model: Any) -> Any:
        models.append(model)
        return find_model_type(model)

    monkeypatch.setattr(attention_layers, "model_type_of", model_type_of)
    return models


def counted(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> int:
    """How many `RandomSynthesizer`s are built in the meantime."""
    built: list[Any] = []
    initialize = RandomSynthesizer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        initialize(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(RandomSynthesizer, "__init__", __init__)
        run()
    return len(built)


@pytest.mark.parametrize(("variant", "parts"), [("random", 1), ("random+dense", 1), ({0: "random"}, 0.5)])
@pytest.mark.parametrize("head", ["BertModel", "T5ForConditionalGeneration", "LlamaForCausalLM"])
@pytest.mark.parametrize("max_length", [None, 9])
def test_each_synthesizer_is_built_once(
    monkeypatch: pytest.MonkeyPatch, head: str, variant: Any, parts: float, max_length: int | None
) -> None:
    patch_model(build(head), "dense")  # the comparison with the stock forward builds a synthesizer, once for a class
    model = build(head)
    layers = len(attention_layers.find_attention_layers(model).layers)
    assert counted(monkeypatch, lambda: patch_model(model, variant, max_length=max_length)) == parts * layers


def test_patching_and_saving_find_the_attention_layers_once(tmp_path: Path, walks: list[Any]) -> None:
    model = build("BertForSequenceClassification")
    patch_model(model, "random")
    assert len(walks) == 1
    walks.clear()
    model.save_pretrained(tmp_path)
    assert len(walks) == 1 and (tmp_path / "README.md").exists()


def test_a_patch_makes_the_classes_of_the_model_alone() -> None:
    script = (
        "from hf_synthesizer import models, patch_model\n"
        "from tests.helpers.models import build\n"
        "patch_model(build('BertForSequenceClassification'), 'random')\n"
        "print(*sorted(name for name in vars(models) if name.startswith('Synth')))\n"
        "from transformers import AutoModelForMaskedLM\n"
        "print(AutoModelForMaskedLM._model_mapping[models.SynthesizerBertConfig].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    classes, head = done.stdout.splitlines()[-2:]
    assert classes == "SynthesizerBertConfig SynthesizerBertForSequenceClassification SynthesizerBertModel", (
        done.stderr
    )
    assert head == "SynthesizerBertForMaskedLM"
