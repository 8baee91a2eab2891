"""Two processes on the CPU train a patched model as one does: DDP and FSDP2 over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.distributed_training import ROWS

ROOT = Path(__file__).parents[2]


def launch(kind: str, folder: Path) -> dict[str, Any]:
    """Run the loop in one process ("none"), or in two, by the command of docs/training.md."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.helpers.distributed_training", kind, str(folder)]
    if kind != "none":
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [sys.executable, "-m", *launcher, *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch("none", tmp_path_factory.mktemp("alone") / "out")


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize(
    ("kind", "model_class"),
    [("ddp", "DistributedDataParallel"), ("fsdp", "FSDPSynthesizerBertForSequenceClassification")],
)
def test_two_processes_do_what_one_does(alone: dict[str, Any], tmp_path: Path, kind: str, model_class: str) -> None:
    result = launch(kind, tmp_path / "out")
    assert result["processes"] == 2 and result["class"] == model_class
    assert len(result["losses"]) == 8 and result["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    logits = torch.tensor(result["logits"])
    assert len(logits) == ROWS  # uneven last batches: no row is lost, none comes twice
    torch.testing.assert_close(logits, torch.tensor(alone["logits"]), rtol=0, atol=1e-4)

    folder = tmp_path / "out" / "checkpoint"
    assert {"config.json", "model.safetensors", "modeling_hf_synthesizer.py", "README.md"} == set(os.listdir(folder))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["SynthesizerBertForSequenceClassification"]
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        found = loaded(input_ids=torch.tensor(result["input_ids"])).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


def test_the_command_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert "torchrun --standalone --nproc_per_node 2 train.py" in page
