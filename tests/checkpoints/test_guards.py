"""What defines a patched layer travels with its tensors, and is compared wherever tensors are."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoModel, Trainer, TrainingArguments

from hf_synthesizer import CheckpointMismatchError, SynthesizerConfig, count_parameters, list_variants, patch_model
from hf_synthesizer.layers.guard import Guard
from hf_synthesizer.synthesizers.fingerprint import fingerprint
from tests.helpers.models import MIXTURES, batch, build, first_output

ROOT = Path(__file__).parents[2]
LAYER = "encoder.layer.0.attention.self"
GUARD = f"{LAYER}.query.weight"
OTHERS = {
    "sparse_strided and sparse_fixed": (("sparse_strided", {}), ("sparse_fixed", {}), "variant is 'sparse_strided'"),
    "stride": (("sparse_strided", {"stride": 2}), ("sparse_strided", {"stride": 8}), "stride is 2, here it is 8"),
    "the default stride": (("sparse_fixed", {"stride": 2}), ("sparse_fixed", {}), "stride is 2, here it is None"),
    "mixing": (
        ("random+dense", {"mixing": "softmax"}),
        ("random+dense", {"mixing": "sum"}),
        "mixing is 'softmax', here it is 'sum'",
    ),
    "the hash": (("lsh_simple", {}), ("alsh_xbox", {}), "variant is 'lsh_simple', here it is 'alsh_xbox'"),
    "qnf": (("alsh_sign", {"qnf": True}), ("alsh_sign", {}), "qnf is True, here it is False"),
    "bucket_size": (("alsh_sign", {}), ("alsh_sign", {"bucket_size": 8}), "bucket_size is 32, here it is 8"),
    "max_length": (
        ("routing", {"max_length": 24}),
        ("routing", {"max_length": 16}),
        "max_length is 24, here it is 16",
    ),
    "two options": (
        ("sparse_strided", {"stride": 2}),
        ("sparse_fixed", {"stride": 8}),
        "variant is 'sparse_strided', here it is 'sparse_fixed'; their stride is 2, here it is 8",
    ),
}
other_patches = pytest.mark.parametrize(("theirs", "ours", "message"), OTHERS.values(), ids=OTHERS)


def patched(how: tuple[str, dict[str, Any]], head: str = "BertModel") -> Any:
    return patch_model(build(head), how[0], **how[1])


@other_patches
@pytest.mark.parametrize("settings", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_the_state_dict_of_another_patch_is_refused(theirs: Any, ours: Any, message: str, settings: Any) -> None:
    model, other = patched(ours), patched(theirs)
    with pytest.raises(CheckpointMismatchError, match=rf"'{LAYER}'.*{message}"):
        model.load_state_dict(other.state_dict(), **settings)
    again = patched(ours)
    again.load_state_dict(model.state_dict(), **settings)
    assert torch.equal(again.state_dict()[GUARD], model.state_dict()[GUARD])


@other_patches
def test_a_checkpoint_whose_config_says_otherwise_is_refused(
    tmp_path: Path, theirs: Any, ours: Any, message: str
) -> None:
    patched(theirs).save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=rf"{tmp_path.name}.*'{LAYER}'.*{message}"):
        AutoModel.from_pretrained(tmp_path, config=patched(ours).config)


def test_a_checkpoint_of_another_process_says_how_it_differs(tmp_path: Path) -> None:
    """The error compares the config.json of the folder with the config that the user hands over."""
    patched(("sparse_strided", {"stride": 3})).save_pretrained(tmp_path / "theirs")
    patched(("sparse_strided", {"stride": 5})).config.save_pretrained(tmp_path / "ours")
    script = (
        "import sys; from transformers import AutoConfig, AutoModel; import hf_synthesizer\n"
        "AutoModel.from_pretrained(sys.argv[1], config=AutoConfig.from_pretrained(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "theirs"), str(tmp_path / "ours")]
    result = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "their stride is 3, here it is 5" in result.stderr


def test_trainer_does_not_resume_from_another_patch(tmp_path: Path) -> None:
    theirs, ours, message = OTHERS["stride"]
    head = "BertForSequenceClassification"
    rows = [{"input_ids": [2, 5, 7, 3], "labels": 0}, {"input_ids": [2, 6, 8, 3], "labels": 1}] * 2
    settings = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    Trainer(patched(theirs, head), settings, train_dataset=rows).train()
    settings.max_steps = 2
    with pytest.raises(CheckpointMismatchError, match=message):
        Trainer(patched(ours, head), settings, train_dataset=rows).train(resume_from_checkpoint=True)
    Trainer(patched(theirs, head), settings, train_dataset=rows).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=str)
def test_accelerate_loads_its_own_and_refuses_another_patch(tmp_path: Path, device_map: Any) -> None:
    theirs, ours, message = OTHERS["stride"]
    model = patched(theirs)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    again = accelerate.load_checkpoint_and_dispatch(patched(theirs), tmp_path, device_map=device_map)
    inputs = batch("BertModel")
    assert torch.equal(first_output(again(**inputs)), first_output(model(**inputs)))
    with pytest.raises(CheckpointMismatchError, match=message):
        accelerate.load_checkpoint_and_dispatch(patched(ours), tmp_path, device_map=device_map)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("variant", ["random", "dot_product", "sparse_strided"])
@pytest.mark.parametrize("head", ["BertModel", "T5EncoderModel"])
def test_a_stock_model_takes_no_state_dict_of_a_patched_one(head: str, variant: str, strict: bool) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for .*\.(query|q)\.weight.*shape torch.Size\(\[1\]\)"):
        build(head).load_state_dict(patch_model(build(head), variant).state_dict(), strict=strict)


CHANGES = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16).float(),
    "type": lambda model: model.type(torch.float64).float(),
    "empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "a state dict in another dtype": lambda model: (
        model.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()}) and model
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_guard_stays_what_it_is(change: Any) -> None:
    model = patched(("dense", {}))
    before = model.state_dict()[GUARD].clone()
    assert torch.equal(change(model).state_dict()[GUARD], before)


def test_fingerprints_tell_what_is_computed_and_not_how_it_began() -> None:
    configs = [SynthesizerConfig(variant, max_length=8) for variant in (*list_variants(), *MIXTURES)]
    configs += [SynthesizerConfig("sparse_fixed", max_length=8, stride=stride) for stride in (2, 4)]
    assert len({fingerprint(config) for config in configs}) == len(configs)
    plain = SynthesizerConfig("random", max_length=8)
    assert fingerprint(plain) == fingerprint(plain.replace(init="handcrafted"))
    # What files hold already: a change here makes every saved model foreign.
    assert fingerprint(plain) == 177233302071261
    assert fingerprint(SynthesizerConfig("sparse_fixed", max_length=8, stride=2)) == 44167264831563


def test_nobody_counts_trains_or_calls_a_guard() -> None:
    model = patched(("random", {}))
    guard = model.get_submodule(f"{LAYER}.query")
    assert isinstance(guard, Guard) and count_parameters(guard, trainable_only=False) == 0
    assert GUARD not in dict(model.named_parameters())
    with pytest.raises(TypeError, match="This projection is gone"):
        guard(torch.zeros(1))


def test_functional_call_around_a_patched_model() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = patched(("dense", {}))

        def forward(self, **inputs: Any) -> torch.Tensor:
            return first_output(self.inner(**inputs))

    model, inputs = Around().eval(), batch("BertModel")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.equal(torch.func.functional_call(model, tensors, (), inputs), model(**inputs))
    foreign = {**tensors, f"inner.{GUARD}": torch.tensor([fingerprint(SynthesizerConfig("random", max_length=24))])}
    with pytest.raises(CheckpointMismatchError, match="layer 0 of this model.*variant is 'random'"):
        torch.func.functional_call(model, foreign, (), inputs)


def test_distributed_state_dicts() -> None:
    theirs, ours, message = OTHERS["stride"]
    model, again = torch.nn.Sequential(patched(theirs)), torch.nn.Sequential(patched(theirs))
    set_model_state_dict(again, get_model_state_dict(model))
    inputs = batch("BertModel")
    assert torch.equal(first_output(again[0](**inputs)), first_output(model[0](**inputs)))
    with pytest.raises(CheckpointMismatchError, match=message):
        set_model_state_dict(torch.nn.Sequential(patched(ours)), get_model_state_dict(model))
