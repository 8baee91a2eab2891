"""Transformers' tensor parallelism carries a patched checkpoint: two processes over gloo do what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_synthesizer import SynthesizerConfig, patch_model

ROOT = Path(__file__).parents[2]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """The model in one process, and what two computed with its checkpoint."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    tiny().save_pretrained(folder / "stock")
    some_heads = [SynthesizerConfig("random+salience", heads=[0]), SynthesizerConfig("dense", heads=[2])]
    hybrid = {0: "random", 1: "factorized_dense+salience", 2: "random+dot_product", 3: some_heads}
    model = patch_model(tiny(), hybrid)
    model.save_pretrained(folder / "patched")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.helpers.tensor_parallel", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return model, torch.load(folder / "result.pt")


@pytest.mark.xdist_group("accelerate")
def test_a_patched_checkpoint_runs_under_tensor_parallelism(run: tuple[LlamaForCausalLM, dict[str, Any]]) -> None:
    model, result = run
    ids = torch.arange(10).view(1, -1)
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(result["loss"], loss.detach(), rtol=0, atol=1e-5)
    loss.backward()
    for name, gradient in result["gradients"].items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(result["generated"], model.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.xdist_group("accelerate")
def test_a_model_that_is_spread_already_is_not_patched(run: tuple[LlamaForCausalLM, dict[str, Any]]) -> None:
    assert "spread over 2 devices" in run[1]["refusal"] and "tp_plan" in run[1]["refusal"]
