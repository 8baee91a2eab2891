"""Weights are read from safetensors files in the checkpoint's own folder, whatever the checkpoint says."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from peft import get_peft_model
from transformers import AutoModel

from hf_synthesizer import CheckpointMismatchError, patch_model
from hf_synthesizer.models import SynthesizerBertModel
from hf_synthesizer.peft import lora_config_for
from tests.checkpoints.test_checkpoint_errors import Bomb, change_config
from tests.helpers.models import build

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    patch_model(build("BertModel"), "dense").save_pretrained(folder, max_shard_size="10KB")
    return folder


def move_first_shard(folder: Path, name: str, index: str = INDEX) -> Path:
    """Give the first shard this name, in the index and on the disk."""
    content = json.loads((folder / INDEX).read_text())
    shards = content["weight_map"]
    first = min(shards.values())
    content["weight_map"] = {key: name if shard == first else shard for key, shard in shards.items()}
    (folder / INDEX).rename(folder / index)
    (folder / index).write_text(json.dumps(content))
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    (folder / first).rename(target)
    return target


@pytest.mark.parametrize("name", ["../x.safetensors", "a/../../x.safetensors", "{outside}/x.safetensors"])
@pytest.mark.parametrize("auto", [AutoModel, SynthesizerBertModel], ids=["AutoModel", "its class"])
def test_an_index_that_names_a_file_of_another_folder(shards: Path, tmp_path: Path, auto: Any, name: str) -> None:
    (shards / "a").mkdir()
    move_first_shard(shards, name.format(outside=tmp_path))
    with pytest.raises(CheckpointMismatchError, match=r"index\.json.*x\.safetensors'.*own folder alone"):
        auto.from_pretrained(shards)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_an_index_that_names_a_pickle(shards: Path, monkeypatch: pytest.MonkeyPatch, variant: str | None) -> None:
    index = INDEX if variant is None else INDEX.replace(".json", f".{variant}.json")
    pickled = move_first_shard(shards, "model-00001.bin", index)
    monkeypatch.setenv("BOMB", str(shards / "exploded"))
    pickled.write_bytes(pickle.dumps(Bomb()))
    read = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: read.append(args))
    with pytest.raises(CheckpointMismatchError, match=r"'model-00001\.bin'.*pickle can run code"):
        AutoModel.from_pretrained(shards, variant=variant)
    assert not read and not (shards / "exploded").exists()


def test_an_index_of_another_name_that_the_config_names(shards: Path) -> None:
    change_config(shards, lambda data: data.update(transformers_weights="my.safetensors.index.json"))
    move_first_shard(shards, "../x.safetensors", "my.safetensors.index.json")
    for auto in (AutoModel, SynthesizerBertModel):
        with pytest.raises(CheckpointMismatchError, match=r"my\.safetensors\.index\.json.*'\.\./x\.safetensors'"):
            auto.from_pretrained(shards)


def test_a_config_that_names_weights_outside_a_repository_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    patch_model(build("BertModel"), "dense").save_pretrained(snapshot)
    (snapshot / "model.safetensors").rename(tmp_path / "x.safetensors")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    change_config(snapshot, lambda data: data.update(transformers_weights="../../../x.safetensors"))
    assert str(tmp_path) != HF_HUB_CACHE
    with pytest.raises(CheckpointMismatchError, match=r"config\.json of 'a/b' names .*own folder"):
        AutoModel.from_pretrained("a/b", cache_dir=tmp_path, local_files_only=True)


def test_an_index_in_the_base_of_an_adapter(shards: Path, tmp_path: Path) -> None:
    model = SynthesizerBertModel.from_pretrained(shards)
    adapter = tmp_path / "adapter"
    model.name_or_path = model.config.name_or_path = str(shards)
    get_peft_model(model, lora_config_for(model)).save_pretrained(adapter)
    move_first_shard(shards, "../x.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"index.*'\.\./x\.safetensors'"):
        SynthesizerBertModel.from_pretrained(adapter)


def test_an_adapter_beside_the_weights_that_is_a_pickle(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SynthesizerBertModel.from_pretrained(shards)
    get_peft_model(model, lora_config_for(model)).save_pretrained(shards)
    AutoModel.from_pretrained(shards)
    (shards / "adapter_model.safetensors").unlink()
    monkeypatch.setenv("BOMB", str(shards / "exploded"))
    (shards / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointMismatchError, match=r"adapter_model\.bin.*Save the adapter as"):
        AutoModel.from_pretrained(shards)
    assert not os.path.exists(shards / "exploded")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}'])
def test_an_index_that_is_damaged(shards: Path, content: str) -> None:
    (shards / INDEX).write_text(content)
    with pytest.raises(CheckpointMismatchError, match=r"index\.json.*(damaged|no 'weight_map')"):
        AutoModel.from_pretrained(shards)


def test_shards_in_a_folder_of_the_checkpoint(shards: Path) -> None:
    move_first_shard(shards, "parts/x.safetensors")
    AutoModel.from_pretrained(shards)
