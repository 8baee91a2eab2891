"""Stock tensors of a patched checkpoint have the names that they have in a stock one, which another release reads."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import NomicBertConfig, NomicBertModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_synthesizer import UnsupportedModelError, patch_model, unpatch_model
from hf_synthesizer.checkpoints import conversions
from hf_synthesizer.checkpoints.auto import serving_auto_classes
from hf_synthesizer.checkpoints.conversions import stock_names
from hf_synthesizer.layers.finding.model_types import served_types
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.layers import TEXT
from tests.helpers.models import build, first_output
from tests.transfer.test_transfer_layers import tiny_models

ROOT = Path(__file__).parents[2]
VIT = "ViTForImageClassification"


def nomic() -> PreTrainedModel:
    """Whose checkpoints hold queries, keys and values of a layer as one tensor."""
    return NomicBertModel(NomicBertConfig(**TEXT)).eval()


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder, **options)
    return load_file(folder / "model.safetensors")


def answers(model: PreTrainedModel) -> torch.Tensor:
    torch.manual_seed(4)
    given: dict[str, Any] = {"input_ids": torch.randint(2, 60, (2, 6))}
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.randn(2, 1, 2, 14)}
    with torch.no_grad():
        return first_output(model.eval()(**given))


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("head", ["ViTModel", VIT])
def test_a_patched_vit_is_saved_under_the_names_of_a_stock_one(tmp_path: Path, head: str, layers: Any) -> None:
    model = build(VIT)
    model = model if head == VIT else model.base_model
    stock = set(saved(model, tmp_path / "stock"))
    patched = set(saved(patch_model(model, "random+dot_product", layers=layers), tmp_path / "patched"))
    ours = {name for name in patched if ".synthesizer." in name or ".stock." in name}
    gone = {name for name in stock if ".key." in name or name.endswith("query.bias")}
    assert ours and patched - ours >= stock - gone and patched - ours <= stock
    assert any("encoder.layer.0.attention" in name for name in patched)


@pytest.mark.parametrize("make", [lambda: build(VIT), nomic], ids=["vit", "nomic_bert"])
@pytest.mark.parametrize("variant", ["random+dot_product", "dense+salience"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_what_has_stock_names_is_loaded_again(tmp_path: Path, make: Any, variant: str, layers: Any) -> None:
    model = patch_model(make(), variant, layers=layers)
    first = saved(model, tmp_path / "first")
    loaded = getattr(transformers, serving_auto_classes(model)[0]).from_pretrained(tmp_path / "first")
    assert torch.equal(answers(loaded), answers(model))
    again = saved(loaded, tmp_path / "again")
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("make", [lambda: build(VIT), nomic], ids=["vit", "nomic_bert"])
def test_a_checkpoint_that_was_written_under_the_names_of_memory_is_loaded(tmp_path: Path, make: Any) -> None:
    model = patch_model(make(), "random+dot_product")
    memory = saved(model, tmp_path / "memory", save_original_format=False)
    assert memory.keys() == model.state_dict().keys()
    loaded = type(model).from_pretrained(tmp_path / "memory")
    assert torch.equal(answers(loaded), answers(model))
    assert saved(loaded, tmp_path / "new").keys() == saved(model, tmp_path / "now").keys()


@pytest.mark.parametrize("model_type", ["dinov3_vit", "tipsv2_text_model"])
def test_names_of_memory_that_a_conversion_would_spoil_are_loaded(tmp_path: Path, model_type: str) -> None:
    tiny = tiny_models.build(model_type)
    model = patch_model(tiny.model, "dense+salience")
    with torch.no_grad():
        expected = first_output(model(**tiny.inputs))
    for folder, options in ((tmp_path / "memory", {"save_original_format": False}), (tmp_path / "new", {})):
        model.save_pretrained(folder, **options)
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            assert torch.equal(first_output(loaded(**tiny.inputs)), expected)


def test_projections_that_a_stock_checkpoint_holds_as_one_tensor_stand_by_themselves_in_patched_layers(
    tmp_path: Path,
) -> None:
    model = nomic()
    stock = saved(model, tmp_path / "stock")
    joined = [name for name in stock if "Wqkv" in name]
    assert joined
    patched = saved(patch_model(model, "random", layers=[0]), tmp_path / "patched")
    assert [name for name in patched if "Wqkv" in name] == [name for name in joined if ".1." in name]
    assert len([name for name in patched if "v_proj" in name]) == len([name for name in joined if ".0." in name])


def test_a_stock_vit_refuses_a_patched_checkpoint_under_its_own_names(tmp_path: Path) -> None:
    saved(patch_model(build(VIT), "random"), tmp_path)
    script = (
        "import sys, transformers\n"
        "try:\n    transformers.ViTForImageClassification.from_pretrained(sys.argv[1])\n"
        "except RuntimeError as error:\n    print('refused', 'size' in str(error))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "refused True", done.stderr


def test_a_model_that_was_loaded_and_patched_is_saved_under_the_names_it_came_with(tmp_path: Path) -> None:
    stock = saved(build(VIT), tmp_path / "stock")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "stock")
    patched = saved(patch_model(model, "random"), tmp_path / "patched")
    assert {name for name in patched if ".synthesizer." not in name} <= stock.keys()
    assert saved(unpatch_model(model), tmp_path / "again").keys() == stock.keys()
    assert not any(isinstance(module, SynthesizerMixin) for module in model.modules())


def test_the_index_of_shards_has_stock_names(tmp_path: Path) -> None:
    model = patch_model(build(VIT), "random")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("encoder.layer.0" in name for name in names) and not any(".layers.0." in name for name in names)
    assert torch.equal(answers(type(model).from_pretrained(tmp_path)), answers(model))


CONVERTED = sorted(model_type for model_type in served_types() if model_type in CONFIG_MAPPING)
UNREADABLE = ("shieldgemma2",)
"""Transformers itself does not read the stock checkpoint again that it writes."""


def names_on_disk(model: PreTrainedModel) -> dict[str, str]:
    """From each tensor's name in memory to that in a checkpoint; joined ones left out."""
    with stock_names(model, list(model.state_dict())):
        backwards = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    found = {name: conversions._renamed(backwards, name, reverse=True) for name in model.state_dict()}
    return {name: on_disk for name, (on_disk, joined) in found.items() if joined is None}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONVERTED)
def test_every_type_that_transformers_converts_has_stock_names(model_type: str) -> None:
    tiny = tiny_models
    try:
        config = tiny.tiny_config(model_type)
        cls = tiny.model_class(model_type, config)
        stock, model = tiny.on_meta(config, cls), tiny.on_meta(config, cls)
    except tiny.NotBuilt:
        return
    expected = names_on_disk(stock)
    with torch.device("meta"), suppress(UnsupportedModelError):  # some have layers that are refused
        patch_model(model, "dense+salience", max_length=64)
    found = names_on_disk(model)
    assert len(set(found.values())) == len(found)
    if model_type in UNREADABLE:
        assert all(name == on_disk for name, on_disk in found.items())
    else:
        shared = [name for name in found if name in expected]
        assert shared and all(found[name] == expected[name] for name in shared)
