"""A checkpoint that does not hold what its config.json promises is an error that names file, key and remedy."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
    T5EncoderModel,
)

from hf_synthesizer import CheckpointMismatchError, patch_model
from hf_synthesizer.models import SynthesizerBertModel
from tests.helpers.models import build

LAYER = "encoder.layer.0.attention.self"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    patch_model(build("BertModel"), {0: "factorized_random", 1: "dense"}).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown key": (lambda s: s.update(colour=1), r"Unknown key 'colour' in .*config\.json.*upgrade"),
    "unknown option": (lambda s: s["configs"][0].update(rnk=3), r"config\.json.*Unknown option 'rnk'.*mean 'rank'"),
    "unknown variant": (
        lambda s: s["configs"][0].update(variant="dens"),
        r"config\.json.*Unknown variant 'dens'.*mean 'dense'",
    ),
    "newer version": (
        lambda s: s.update(format_version=2),
        r"config\.json has format_version 2.*Upgrade it: `pip install",
    ),
    "version 0": (lambda s: s.update(format_version=0), r"has format_version 0; .*reads 1\. Save .*again"),
    "a negative version": (lambda s: s.update(format_version=-1), r"has format_version -1; .*Save .*again"),
    "a version that is no number": (lambda s: s.update(format_version=True), r"has format_version True; .*Save"),
    "no version": (lambda s: s.pop("format_version"), r"config\.json has format_version None"),
    "no layers": (lambda s: s.pop("layers"), r"config\.json is damaged"),
    "no word on how layers are served": (lambda s: s.pop("served_by"), r"config\.json is damaged.*served_by"),
    "a configuration that is not there": (lambda s: s["layers"].update(encoder=[0, 7]), r"config\.json is damaged"),
    "too many layers": (
        lambda s: [s[name].update(encoder=[0, row, row]) for name, row in (("layers", 1), ("served_by", 0))],
        r"describes 3 self-attention layers of the stack 'encoder'.*BertModel has 2.*number of layers",
    ),
    "too few layers": (
        lambda s: [s[name].update(encoder=[0]) for name in ("layers", "served_by")],
        r"describes 1 self-attention layers .*BertModel has 2: the others would be stock, with random weights",
    ),
    "no layer": (lambda s: (s["served_by"].clear(), s["layers"].clear()), "describes 0 self-attention layers"),
    "another stack": (
        lambda s: s.update({name: {"decoder": s[name]["encoder"]} for name in ("layers", "served_by")}),
        "describes the stacks decoder, but this model has encoder and none of those",
    ),
    "other layers than are served": (lambda s: s["layers"].update(encoder=[0, 1, 1]), "damaged .*name other layers"),
    "layers that are served in no known way": (
        lambda s: s["forwards"][0].update(forward="both"),
        "damaged .*'forward' of 'own' or 'stock', not by .*'both'",
    ),
    "a configuration that is counted from the end": (
        lambda s: s["layers"].update(encoder=[0, -1]),
        "damaged .*-1 is no number of an entry",
    ),
    "a configuration that is no number": (
        lambda s: s["layers"].update(encoder=[0, True]),
        "damaged .*True is no number of an entry",
    ),
    "no groups of heads": (lambda s: s["layers"].update(encoder=[0, []]), "damaged .*empty list of groups"),
    "wrong shape": (
        lambda s: s["configs"][0].update(rank=3),
        rf"checkpoint .*'{LAYER}'.*their rank is 8, here it is 3\..*config\.json",
    ),
    "wrong length": (
        lambda s: s["configs"][1].update(max_length=9),
        r"checkpoint .*their max_length is 24, here it is 9\..*config\.json",
    ),
    "another variant": (
        lambda s: s["configs"][0].update(variant="random"),
        r"checkpoint .*their variant is 'factorized_random', here it is 'random'",
    ),
    "a layer less": (
        lambda s: (s["served_by"].update(encoder=[None, 0]), s["layers"].update(encoder=[None, 1])),
        rf"holds the tensor '{LAYER}\.synthesizer\.key_factor'.*'synthesizer' of its config\.json has no place",
    ),
}


@pytest.mark.parametrize(("change", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_was_tampered_with(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    change_config(folder, lambda data: change(data["synthesizer"]))
    with pytest.raises(CheckpointMismatchError, match=message):
        AutoModel.from_pretrained(folder)


def test_a_config_with_another_number_of_layers_or_another_model_type(folder: Path) -> None:
    for change in ({"num_hidden_layers": 3}, {"num_hidden_layers": 1}):
        before = (folder / "config.json").read_text()
        change_config(folder, lambda data, change=change: data.update(change))
        with pytest.raises(CheckpointMismatchError, match=r"describes 2 self-attention layers.*BertModel has [13]"):
            AutoModel.from_pretrained(folder)
        (folder / "config.json").write_text(before)
    change_config(folder, lambda data: data.update(model_type="synthesizer_gpt2"))
    with pytest.raises(CheckpointMismatchError, match=r"describes the stacks encoder, but this model has decoder"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("found", [None, "dense", []])
def test_a_config_without_a_description(folder: Path, found: Any) -> None:
    change_config(folder, lambda data: data.update(synthesizer=found))
    with pytest.raises((CheckpointMismatchError, ValueError), match="synthesizer"):
        AutoModel.from_pretrained(folder)


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (
        lambda tensors: tensors.pop(f"{LAYER}.synthesizer.key_factor"),
        rf"lacks 1 tensors.*'{LAYER}\.synthesizer\.key_factor'.*config\.json promises",
    ),
    "missing value": (lambda tensors: tensors.pop(f"{LAYER}.value.weight"), rf"lacks.*'{LAYER}\.value\.weight'"),
    "wrong shape": (
        lambda tensors: tensors.update({f"{LAYER}.synthesizer.key_factor": torch.zeros(3, 24, 4)}),
        r"key_factor' has the shape \(3, 24, 4\), but its config\.json asks for \(3, 24, 8\)",
    ),
    "renamed": (
        lambda tensors: tensors.update(
            {f"{LAYER}.synthesizer.factor": tensors.pop(f"{LAYER}.synthesizer.key_factor")}
        ),
        "lacks 1 tensors",
    ),
    "one too many": (
        lambda tensors: tensors.update({f"{LAYER}.synthesizer.extra": torch.zeros(3)}),
        rf"holds the tensor '{LAYER}\.synthesizer\.extra'.*no place",
    ),
    "another embedding": (
        lambda tensors: tensors.update({"embeddings.word_embeddings.weight": torch.zeros(65, 24)}),
        r"'embeddings\.word_embeddings\.weight' has the shape \(65, 24\).*ignore_mismatched_sizes=True",
    ),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_were_tampered_with(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointMismatchError, match=message):
        AutoModel.from_pretrained(folder)


def test_synthesizers_are_never_started_afresh_on_loading(folder: Path) -> None:
    change_tensors(folder, TENSORS["wrong shape"][0])
    with pytest.raises(CheckpointMismatchError, match="key_factor"):
        AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_code_that_catches_what_transformers_raises_catches_ours(tmp_path: Path) -> None:
    patch_model(build("BertForSequenceClassification"), "dense").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="num_labels|mismatch|classifier") as caught:
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=42)
    assert isinstance(caught.value, CheckpointMismatchError)


def test_a_head_of_another_size_is_started_afresh_when_asked(tmp_path: Path) -> None:
    patch_model(build("BertForSequenceClassification"), "dense").save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"'classifier.*ignore_mismatched_sizes=True"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert loaded.classifier.weight.shape[0] == 5
    assert {key for key, _, _ in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_files(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointMismatchError, match=r"model\.safetensors is truncated or damaged.*again"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("place", [0, 12])
def test_a_damaged_header(folder: Path, place: int) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place : place + 4] = b"\xff" * 4
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointMismatchError, match=r"model\.safetensors is truncated or damaged"):
        AutoModel.from_pretrained(folder)


def test_the_damaged_shard_is_the_one_that_is_named(tmp_path: Path) -> None:
    patch_model(build("BertModel"), "dense").save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointMismatchError, match=shard.name):
        AutoModel.from_pretrained(tmp_path)
    shard.unlink()
    with pytest.raises((OSError, CheckpointMismatchError), match=shard.name):
        AutoModel.from_pretrained(tmp_path)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["BOMB"],))


@pytest.mark.parametrize("settings", [{}, {"use_safetensors": False}, {"use_safetensors": None}], ids=str)
def test_pickles_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("BOMB", str(folder / "exploded"))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises((CheckpointMismatchError, OSError), match="safetensors"):
        AutoModel.from_pretrained(folder, **settings)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize(("stock", "head"), [(BertModel, "BertModel"), (T5EncoderModel, "T5EncoderModel")])
def test_a_stock_class_stops(tmp_path: Path, variant: str, stock: Any, head: str) -> None:
    patch_model(build(head), variant).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        stock.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="size mismatch for encoder"):
        build(head).load_state_dict(tensors, strict=False)


class ReviewModel(BertPreTrainedModel):
    """What people write around a base model."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config)
        self.stars = torch.nn.Linear(config.hidden_size, 5)
        self.post_init()


@pytest.mark.parametrize("whole", [BertForSequenceClassification, ReviewModel])
def test_a_head_that_is_not_patched_with_its_base_saves_guards_too(tmp_path: Path, whole: Any) -> None:
    model = whole(build("BertModel").config)
    patch_model(model.bert, "dense")
    model.config = model.bert.config
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch|size"):
        whole.from_pretrained(tmp_path)
    again = whole(build("BertModel").config)
    patch_model(again.bert, "dense")
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_weights(again, model)
    assert_same_weights(AutoModel.from_pretrained(tmp_path), model.bert)
    if whole is BertForSequenceClassification:
        assert_same_weights(AutoModelForSequenceClassification.from_pretrained(tmp_path), model)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    tensors, others = dict(one.named_parameters()), dict(other.named_parameters())
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_stock_checkpoint_in_a_patched_class(tmp_path: Path) -> None:
    build("BertModel").save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="'synthesizer' of config.json"):
        SynthesizerBertModel.from_pretrained(tmp_path)
    config = patch_model(build("BertModel"), "dense").config
    with pytest.raises(CheckpointMismatchError, match="lacks.*stock checkpoint.*from_pretrained_patched"):
        SynthesizerBertModel.from_pretrained(tmp_path, config=config)


def test_state_dicts_of_other_models_are_refused_even_when_keys_may_be_missing(tmp_path: Path) -> None:
    model = patch_model(build("BertModel"), "dense")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = {"but not its tensor": build("BertModel"), "patched in": patch_model(build("BertModel"), "random")}
    for reason, other in others.items():
        with pytest.raises(CheckpointMismatchError, match=rf"'{LAYER}' .*{reason}"):
            model.load_state_dict(other.state_dict(), strict=False)
    partial = {"pooler.dense.weight": before["pooler.dense.weight"]}
    model.load_state_dict(partial, strict=False)
    patch_model(build("BertModel"), "dense").save_pretrained(tmp_path)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))  # with the guards in it


WITHOUT_IMPORT = """
import sys
from transformers import AutoModel
if {hide!r}:
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "hf_synthesizer":
                raise ModuleNotFoundError("No module named 'hf_synthesizer'", name="hf_synthesizer")
    sys.meta_path.insert(0, Hidden())
for settings in ({{}}, dict(trust_remote_code=False), dict(trust_remote_code=True)):
    try:
        model = AutoModel.from_pretrained({folder!r}, **settings)
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
    else:
        model.save_pretrained({folder!r} + "/again")
        print(type(model).__module__, type(model).__name__)
"""


@pytest.mark.parametrize(
    ("hide", "trusted"),
    [
        (False, r"hf_synthesizer\.models SynthesizerBertModel"),
        (True, r"ImportError .*not installed. Install it \(`pip install (\.|git\+)"),
    ],
    ids=["the plugin is there", "the plugin is not there"],
)
def test_a_process_that_did_not_import_the_plugin(folder: Path, hide: bool, trusted: str) -> None:
    script = WITHOUT_IMPORT.format(hide=hide, folder=str(folder))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
    )
    said = [line for line in done.stdout.splitlines() if re.search(r"\wError |hf_synthesizer\.models", line)]
    assert len(said) == 3, done.stdout + done.stderr
    untrusted = "ValueError .*contains custom code.*trust_remote_code=True"
    assert re.search(untrusted, said[0]) and re.search(untrusted, said[1]) and re.search(trusted, said[2]), said
    if not hide:
        names = {path.name for path in (folder / "again").iterdir()}
        assert names == {"README.md", "config.json", "model.safetensors", "modeling_hf_synthesizer.py"}
        assert (folder / "again" / "config.json").read_text() == (folder / "config.json").read_text()


def test_a_class_that_this_version_does_not_have(folder: Path) -> None:
    from hf_synthesizer.models.registration import remote_class

    with pytest.raises(CheckpointMismatchError, match=r"'SynthesizerNovelModel'.*Install a newer one \(`pip install"):
        remote_class("SynthesizerNovelModel")
    assert remote_class("SynthesizerBertModel") is SynthesizerBertModel
