"""What is saved is what is loaded: every variant, every head, the same process and a new one, whichever way."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_synthesizer import (
    AlreadyPatchedError,
    NotPatchedError,
    SynthesizerConfig,
    UnsupportedModelError,
    from_pretrained_patched,
    fuse_for_inference,
    models,
    patch_model,
    patch_report,
    unpatch_model,
)
from hf_synthesizer.checkpoints.auto import serving_auto_classes
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.models import classes
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import HEADS, RELATIVES, VARIANTS, batch, build, first_output
from tests.helpers.word_tokenizer import save_tokenizer

MATRIX = [(variant, head) for variant in VARIANTS for head in (*HEADS, *LAYER_CLASSES)]
MATRIX += [(variant, head) for variant in RELATIVES for head in ("BertForSequenceClassification", "T5EncoderModel")]
ENCODER, SEQ2SEQ = "BertForSequenceClassification", "T5ForConditionalGeneration"


def output(model: Any, head: str) -> torch.Tensor:
    """The main output for the one batch of each head that all processes agree on."""
    torch.manual_seed(1)
    with torch.no_grad():
        return first_output(model.eval()(**batch(head)))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def auto_class(model: Any) -> Any:
    return getattr(transformers, serving_auto_classes(model)[0])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A folder of checkpoints, one for each variant and head, and for each its Auto class and the digest it owes."""
    root, expected = tmp_path_factory.mktemp("checkpoints"), {}
    torch.manual_seed(0)
    for variant, head in MATRIX:
        model = patch_model(build(head), variant)
        model.save_pretrained(root / variant / head)
        expected[f"{variant}/{head}"] = [auto_class(model).__name__, digest(output(model, head))]
    return root, expected


def load_all(root: str, cases: dict[str, list[str]]) -> dict[str, str]:
    """Runs in the new process."""
    return {
        name: digest(output(getattr(transformers, auto).from_pretrained(f"{root}/{name}"), name.rpartition("/")[2]))
        for name, (auto, _) in cases.items()
    }


@pytest.fixture(scope="module")
def in_a_new_process(checkpoints: tuple[Path, dict[str, list[str]]]) -> dict[str, str]:
    script = (
        "import json, sys, tests.checkpoints.test_checkpoints as module\n"
        "print('\\n' + json.dumps(module.load_all(sys.argv[1], json.loads(sys.argv[2]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(checkpoints[0]), json.dumps(checkpoints[1])],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize(("variant", "head"), MATRIX)
def test_round_trip_is_bit_equal(checkpoints, in_a_new_process, variant: str, head: str) -> None:
    root, expected = checkpoints
    name = f"{variant}/{head}"
    auto, owed = expected[name]
    model = getattr(transformers, auto).from_pretrained(root / name)
    assert type(model).__name__ == f"Synthesizer{head}"
    assert digest(output(model, head)) == owed
    assert in_a_new_process[name] == owed


@pytest.mark.feature("save_pretrained and the Auto classes", kinds=["hybrids"])
@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_hybrids_and_layer_choices_travel(tmp_path: Path, head: str) -> None:
    spec = {0: SynthesizerConfig("factorized_random", rank=3), 1: "dense+salience"}
    if head == SEQ2SEQ:
        spec = {"encoder.1": SynthesizerConfig("random", max_length=20, share_heads=True), "decoder": "dense"}
    model = patch_model(build(head), spec)
    model.save_pretrained(tmp_path)
    loaded = auto_class(model).from_pretrained(tmp_path)
    assert torch.equal(output(loaded, head), output(model, head))
    assert patch_report(loaded) == patch_report(model)
    stored = json.loads((tmp_path / "config.json").read_text())["synthesizer"]
    assert stored["format_version"] == 1 and stored == model.config.synthesizer == loaded.config.synthesizer


@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_saving_again_changes_nothing(tmp_path: Path, head: str) -> None:
    model = patch_model(build(head), "dense")
    model.save_pretrained(tmp_path / "first")
    auto_class(model).from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for name in ("config.json", "modeling_hf_synthesizer.py", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_the_other_heads_load_from_the_same_checkpoint(tmp_path: Path) -> None:
    model = patch_model(build(SEQ2SEQ), {"encoder": "dense", "decoder": "random"})
    model.save_pretrained(tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForTextEncoding):
        loaded = auto.from_pretrained(tmp_path)
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])


LOADING = {
    "device_map": {"device_map": {"": "cpu"}},
    "device_map auto": {"device_map": "auto"},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "eager": {"attn_implementation": "eager"},
    "no mapped file": {"disable_mmap": True},
}


@pytest.mark.parametrize("settings", LOADING.values(), ids=LOADING)
@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_ways_to_load(tmp_path: Path, head: str, settings: dict[str, Any]) -> None:
    model = patch_model(build(head), "factorized_random+dot_product")
    model.save_pretrained(tmp_path)
    loaded = auto_class(model).from_pretrained(tmp_path, **settings)
    if "attn_implementation" in settings:
        model.set_attn_implementation("eager")
    assert torch.equal(output(loaded, head), output(model, head))


@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_dtype(tmp_path: Path, variant: str, head: str) -> None:
    model = patch_model(build(head), variant)
    model.save_pretrained(tmp_path)
    loaded = auto_class(model).from_pretrained(tmp_path, dtype="bfloat16")
    model.to(torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert {tensor.dtype for tensor in loaded.state_dict().values() if tensor.is_floating_point()} == {torch.bfloat16}


@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_sharded(tmp_path: Path, head: str) -> None:
    model = patch_model(build(head), "dense+dot_product")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(output(auto_class(model).from_pretrained(tmp_path), head), output(model, head))


def test_file_variants_and_subfolders(tmp_path: Path) -> None:
    model = patch_model(build(ENCODER), "random")
    model.save_pretrained(tmp_path / "inner", variant="fp16")
    assert (tmp_path / "inner" / "model.fp16.safetensors").exists()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, subfolder="inner", variant="fp16")
    assert torch.equal(output(loaded, ENCODER), output(model, ENCODER))


def test_layers_on_disk(tmp_path: Path) -> None:
    model = patch_model(build(ENCODER), "fixed_random+salience")
    model.save_pretrained(tmp_path)
    where = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": "disk"}
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, device_map={**where, "bert.pooler": "cpu", "classifier": "cpu"}, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(output(loaded, ENCODER), output(model, ENCODER))


def test_loaded_models_know_that_they_are_patched(tmp_path: Path) -> None:
    model = patch_model(build(ENCODER), "dense")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert patch_report(loaded).parameters_before == patch_report(model).parameters_before
    with pytest.raises(NotPatchedError, match="loaded from a patched checkpoint"):
        unpatch_model(loaded)
    with pytest.raises(AlreadyPatchedError):
        patch_model(loaded, "random")
    assert torch.equal(output(pickle.loads(pickle.dumps(loaded)), ENCODER), output(model, ENCODER))


def test_saving_leaves_no_trace_in_an_unpatched_model(tmp_path: Path) -> None:
    model = build(ENCODER)
    before = output(model, ENCODER)
    patch_model(model, "dense").save_pretrained(tmp_path / "patched")
    unpatch_model(model).save_pretrained(tmp_path / "stock")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "stock")
    assert type(loaded).__name__ == ENCODER and torch.equal(output(loaded, ENCODER), before)
    assert "auto_map" not in loaded.config.to_dict() and not list((tmp_path / "stock").glob("*.py"))


@pytest.mark.parametrize("model_type", ["bert", "t5", "llama"])
def test_every_auto_class_that_serves_a_stock_class_serves_the_patched_one(model_type: str) -> None:
    stock_config = type(AutoConfig.for_model(model_type))
    config_class = classes.config_class(stock_config)
    for auto in vars(transformers).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and stock_config in mapping and "PreTrainedModel" in str(mapping[stock_config].__mro__):
            assert mapping[config_class] is classes.model_class(mapping[stock_config])
    config = AutoConfig.for_model(f"synthesizer_{model_type}")
    assert type(config) is config_class


def test_a_class_that_is_asked_for_before_its_config_is_the_one_that_auto_classes_build() -> None:

    patched = models.SynthesizerXmodModel  # of a model type that nothing else here asks for
    assert AutoModel._model_mapping[patched.config_class] is patched


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written yet is NaN, so that whoever reads it gives himself away."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def poisoned(*args: Any, allocate: Any = allocate, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        monkeypatch.setattr(torch, name, poisoned)


def clean(model: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_from_config_initialises_everything(variant: str, head: str) -> None:
    config = patch_model(build(head), variant).config
    model = auto_class(patch_model(build(head), variant)).from_config(config)
    assert type(model).__name__ == f"Synthesizer{head}" and clean(model)
    layer = next(module for module in model.modules() if isinstance(module, SynthesizerMixin))
    assert layer.synthesizer.config.variant == variant


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("settings", [{}, {"device_map": "auto"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("head", [ENCODER, SEQ2SEQ])
def test_a_base_checkpoint_loads_straight_into_a_patched_model(
    tmp_path: Path, variant: str, head: str, settings: dict[str, Any]
) -> None:
    stock = build(head)
    stock.save_pretrained(tmp_path)
    model = from_pretrained_patched(tmp_path, auto_class(patch_model(build(head), "random")), variant, **settings)
    assert type(model).__name__ == f"Synthesizer{head}" and clean(model)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    kept = {name: tensor for name, tensor in model.named_parameters() if ".synthesizer." not in name}
    assert all(torch.equal(tensor, stock.state_dict()[name].to(dtype)) for name, tensor in kept.items())
    assert output(model, head).isfinite().all() and type(unpatch_model(model)) is type(stock)


def test_loading_and_patching_takes_arguments_for_both(tmp_path: Path) -> None:
    build("BertModel").save_pretrained(tmp_path, variant="fp16")
    model = from_pretrained_patched(
        tmp_path, AutoModelForSequenceClassification, "dense", layers=[1], max_length=9, num_labels=5, variant="fp16"
    )
    assert model.config.num_labels == 5
    assert [layer.note for layer in patch_report(model).layers] == ["not selected", "max_length=9"]


def test_loading_and_patching_wants_a_stock_checkpoint_in_memory(tmp_path: Path) -> None:
    patch_model(build("BertModel"), "random").save_pretrained(tmp_path / "patched")
    with pytest.raises(AlreadyPatchedError):
        from_pretrained_patched(tmp_path / "patched", AutoModel, "random")
    build("BertModel").save_pretrained(tmp_path / "stock")
    where = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    with pytest.raises(UnsupportedModelError, match=r"out of memory.*device_map=\{'': 'cpu'\}"):
        from_pretrained_patched(
            tmp_path / "stock", AutoModel, "random", device_map=where, offload_folder=tmp_path / "offload"
        )


def test_pipelines_take_a_patched_model_without_a_murmur(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = patch_model(build(ENCODER), "dense")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    transformers.logging.enable_propagation()
    classify = pipeline("text-classification", str(tmp_path))
    transformers.logging.disable_propagation()
    assert not caplog.records
    inputs = AutoTokenizer.from_pretrained(tmp_path)("w5 w6 w7", return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits.softmax(-1).max().item()
    assert classify("w5 w6 w7")[0]["score"] == expected


def test_memory_of_loaded_tensors_is_aligned(tmp_path: Path) -> None:
    patch_model(build(ENCODER), "factorized_random").save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.state_dict().values())


def test_guards_are_a_few_bytes_that_no_stock_projection_has(tmp_path: Path) -> None:
    patch_model(build(SEQ2SEQ), "random", layers={"encoder": [1]}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert [name for name, tensor in tensors.items() if tensor.shape == (1,)] == [
        "encoder.block.1.layer.0.SelfAttention.q.weight"
    ]


def test_a_fused_model_saves_what_it_was_fused_from(tmp_path: Path) -> None:
    model = patch_model(build(ENCODER), "random")
    expected = output(model, ENCODER)
    fuse_for_inference(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(AutoModelForSequenceClassification.from_pretrained(tmp_path), ENCODER), expected)
