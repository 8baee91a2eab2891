"""Heads that build their base by `AutoModel.from_config`, as Llama's and its relatives' do: saved, and loaded by a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_synthesizer import SynthesizerConfig, patch_model, patch_report
from tests.helpers.layers import GROUPED

ROOT = Path(__file__).parents[2]
AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
MODELS = {
    "Llama": ("LlamaConfig", tuple(AUTO_CLASSES)),
    "Qwen3": ("Qwen3Config", tuple(AUTO_CLASSES)),
    "Gemma3Text": ("Gemma3TextConfig", ("ForSequenceClassification",)),
}
HEADS = [(name, head) for name, (_, heads) in MODELS.items() for head in heads]
SPECS: dict[str, Any] = {
    "random": "random",
    "mixture": "random+dot_product",
    "hybrid": {0: "random+salience"},
    "heads": {"decoder.1": SynthesizerConfig("dense", heads=(0, 3))},
}
CASES = [(name, head, spec) for name, head in HEADS for spec in SPECS]


def build(name: str, head: str) -> PreTrainedModel:
    config = getattr(transformers, MODELS[name][0])(**GROUPED, head_dim=4, num_labels=2)
    return getattr(transformers, name + head)(config).eval()


def answers(model: PreTrainedModel) -> list[float]:
    tokens = torch.arange(2, 14).reshape(2, 6)
    with torch.no_grad():
        output = model.eval()(input_ids=tokens)
    return torch.cat([output[key].flatten() for key in output if key.endswith("logits")]).tolist()


def load_all(root: str) -> dict[str, list[float]]:
    """Runs in the new process: a checkpoint of each head, by its Auto class."""
    return {
        f"{name}/{head}/{spec}": answers(
            getattr(transformers, AUTO_CLASSES[head]).from_pretrained(f"{root}/{name}/{head}/{spec}")
        )
        for name, head, spec in CASES
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A folder of checkpoints, and what the model of each answered before it was saved."""
    root, expected = tmp_path_factory.mktemp("heads"), {}
    torch.manual_seed(0)
    for name, head, spec in CASES:
        model = patch_model(build(name, head), SPECS[spec])
        model.save_pretrained(root / name / head / spec)
        expected[f"{name}/{head}/{spec}"] = answers(model)
    return root, expected


@pytest.fixture(scope="module")
def in_a_new_process(checkpoints: tuple[Path, dict[str, list[float]]]) -> dict[str, list[float]]:
    script = "import json, sys, tests.checkpoints.test_generic_heads as module; print('\\n' + json.dumps(module.load_all(sys.argv[1])))"
    command = [sys.executable, "-c", script, str(checkpoints[0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("generic_heads")
@pytest.mark.parametrize(("name", "head", "spec"), CASES)
def test_a_head_of_llamas_relatives_is_saved_and_loaded_by_a_new_process(
    checkpoints: tuple[Path, dict[str, list[float]]],
    in_a_new_process: dict[str, list[float]],
    name: str,
    head: str,
    spec: str,
) -> None:
    case = f"{name}/{head}/{spec}"
    assert in_a_new_process[case] == checkpoints[1][case]


def test_the_layers_of_a_loaded_head_are_those_that_were_saved(
    checkpoints: tuple[Path, dict[str, list[float]]],
) -> None:
    folder = checkpoints[0] / "Qwen3" / "ForSequenceClassification" / "hybrid"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(loaded).__name__ == "SynthesizerQwen3ForSequenceClassification"
    assert type(loaded.model).__name__ == "SynthesizerQwen3Model"
    model = patch_model(build("Qwen3", "ForSequenceClassification"), {0: "random+salience"})
    assert patch_report(loaded).layers == patch_report(model).layers


def test_the_base_of_such_a_head_loads_by_itself(checkpoints: tuple[Path, dict[str, list[float]]]) -> None:
    folder = checkpoints[0] / "Llama" / "ForTokenClassification" / "mixture"
    head = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    base = transformers.AutoModel.from_pretrained(folder)
    tokens = torch.arange(2, 14).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(base(tokens)[0], head.model(tokens)[0])
