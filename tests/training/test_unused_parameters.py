"""Patched layers train all parameters that they have: DDP waits for a gradient of each."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Olmo2Config, PreTrainedModel, Qwen3Config

from hf_synthesizer import patch_model, unpatch_model
from tests.helpers.layers import GROUPED
from tests.helpers.models import batch, first_output

NORMED = {
    "qwen3": Qwen3Config(**GROUPED, head_dim=4),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=4),
    "olmo2": Olmo2Config(**GROUPED),
}


def build(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(NORMED[name]))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    distributed.init_process_group(
        "gloo", init_method=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("variant", ["random", "dense+salience", "sparse_fixed", "random+dot_product"])
@pytest.mark.parametrize("name", NORMED)
def test_ddp_needs_no_search_for_unused_parameters(name: str, variant: str, one_process: None) -> None:
    model = DistributedDataParallel(patch_model(build(name), variant))
    given = batch("LlamaForCausalLM")
    for _ in range(2):  # the second forward raises where the first backward missed a parameter
        model.zero_grad()
        first_output(model(**given)).pow(2).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", NORMED)
def test_norms_that_nothing_uses_stay_in_checkpoints(name: str, tmp_path: Path) -> None:
    stock, given = build(name), batch("LlamaForCausalLM")
    names = {key for key in stock.state_dict() if "q_norm" in key or "k_norm" in key}
    parameters = {key: (id(parameter), parameter.requires_grad) for key, parameter in stock.named_parameters()}
    with torch.no_grad():
        before = first_output(stock(**given))
    model = patch_model(stock, "random")
    assert names and names < model.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not [key for key, _ in loaded.named_parameters() if "norm" in key and key in names]
    saved, found = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(saved[key], found[key]) for key in saved)
    unpatch_model(model)
    with torch.no_grad():
        assert torch.equal(first_output(model(**given)), before)
    assert {key: (id(parameter), parameter.requires_grad) for key, parameter in model.named_parameters()} == parameters
