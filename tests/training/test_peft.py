"""LoRA on a patched model trains what it should, merges, saves, and comes back onto a patched base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from hf_synthesizer import CheckpointMismatchError, NotPatchedError, UnsupportedModelError, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.peft import load_lora, lora_config_for
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import batch, build, first_output

BERT, T5 = "BertForSequenceClassification", "T5ForConditionalGeneration"
NEEDS_LABELS = {BERT: torch.tensor([0, 1, 0]), T5: torch.arange(2, 20).reshape(3, 6)}


def run(model: Any, head: str) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return first_output(model.eval()(**batch(head)))


def train(model: Any, head: str) -> None:
    """Two steps, large enough to be seen in the output."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    torch.manual_seed(2)
    inputs = batch(head)
    inputs.pop("decoder_input_ids", None)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(**inputs, labels=NEEDS_LABELS[head]).loss.backward()
        optimizer.step()


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.feature("LoRA")
@pytest.mark.parametrize("head", [BERT, T5])
def test_lora_trains_what_is_new_whole_and_adapts_the_rest(variant: str, head: str) -> None:
    model = patch_model(build(head), variant)
    names = {name for name, _ in model.named_parameters() if ".synthesizer." in name}
    before = run(model, head)
    peft_model = get_peft_model(model, lora_config_for(model, r=2, lora_alpha=4))
    torch.testing.assert_close(run(peft_model, head), before)
    found = trained(peft_model)
    assert not {name for name in found if not any(p in name for p in ("lora_", "synthesizer", "classifier"))}
    if variant == "dot_product":
        assert any("synthesizer.query.lora_A" in name for name in found)
    else:
        for name in names:
            path, _, inner = name.partition(".synthesizer.")
            assert f"base_model.model.{path}.synthesizer.modules_to_save.default.{inner}" in found
    value = "value" if head == BERT else ".v"
    assert sum(f"{value}.lora_A" in name for name in found) == (2 if head == BERT else 4)
    start = {name: parameter.clone() for name, parameter in peft_model.named_parameters()}
    train(peft_model, head)
    for name, parameter in peft_model.named_parameters():
        moved = not torch.equal(parameter, start[name])
        assert moved <= (name in found), name
        if ".synthesizer.modules_to_save." in name and not name.endswith("key.bias"):
            assert moved, name


@pytest.mark.parametrize("head", [BERT, T5])
@pytest.mark.parametrize("variant", ["dense+salience", "fixed_random+dot_product", {0: "random"}], ids=str)
def test_save_reload_and_merge(tmp_path: Path, variant: Any, head: str) -> None:
    model = patch_model(build(head), variant)
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")
    peft_model = get_peft_model(model, lora_config_for(model, r=2))
    train(peft_model, head)
    expected = run(peft_model, head)
    peft_model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()

    base = type(model).from_pretrained(tmp_path / "base")
    untouched = run(base, head)
    reloaded = load_lora(base, tmp_path / "adapter")
    assert torch.equal(run(reloaded, head), expected)
    with reloaded.disable_adapter():
        assert torch.equal(run(reloaded, head), untouched)

    merged = reloaded.merge_and_unload()
    assert type(merged) is type(model)
    torch.testing.assert_close(run(merged, head), expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "merged"), head), run(merged, head))


@pytest.mark.parametrize("head", LAYER_CLASSES)
@pytest.mark.parametrize("variant", ["random+salience", "random+dot_product"])
def test_lora_on_a_model_of_each_layer_class(tmp_path: Path, variant: str, head: str) -> None:
    model = patch_model(build(head), variant)
    model.save_pretrained(tmp_path / "base")
    before = run(model, head)
    peft_model = get_peft_model(model, lora_config_for(model, r=2))
    torch.testing.assert_close(run(peft_model, head), before)
    found = trained(peft_model)
    layers = [name for name, module in peft_model.named_modules() if isinstance(module, SynthesizerMixin)]
    for name in layers:
        assert any(other.startswith(f"{name}.synthesizer.modules_to_save") for other in found)
        assert any(other.startswith(f"{name}.") and "lora_A" in other for other in found)
    optimizer = torch.optim.SGD((p for p in peft_model.parameters() if p.requires_grad), lr=0.1)
    first_output(peft_model.train()(**batch(head))).square().mean().backward()
    optimizer.step()
    expected = run(peft_model, head)
    assert not torch.equal(expected, before)
    peft_model.save_pretrained(tmp_path / "adapter")
    reloaded = load_lora(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(run(reloaded, head), expected)
    torch.testing.assert_close(run(reloaded.merge_and_unload(), head), expected, rtol=1e-3, atol=1e-4)


def test_the_auto_class_of_peft(tmp_path: Path) -> None:
    patch_model(build(BERT), "dense").save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    peft_model = get_peft_model(model, lora_config_for(model, r=2))
    train(peft_model, BERT)
    peft_model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert torch.equal(run(loaded, BERT), run(peft_model, BERT))


def test_arguments_of_lora() -> None:
    model = patch_model(build(BERT), "dense")
    config = lora_config_for(model, r=3, target_modules=["value"], modules_to_save=["pooler"], task_type=None)
    assert isinstance(config, LoraConfig) and config.r == 3
    assert set(config.target_modules) == {"value"}
    assert "pooler" in config.modules_to_save and "bert.encoder.layer.0.attention.self.synthesizer" in (
        config.modules_to_save
    )
    assert config.task_type is None and lora_config_for(model).task_type == "SEQ_CLS"


@pytest.mark.parametrize("head", [BERT, T5])
@pytest.mark.parametrize("variant", ["dense", "dot_product", {1: "random"}], ids=str)
def test_peft_itself_refuses_a_stock_base(tmp_path: Path, variant: Any, head: str) -> None:
    model = patch_model(build(head), variant)
    model.save_pretrained(tmp_path / "base")
    peft_model = get_peft_model(model, lora_config_for(model, r=2))
    train(peft_model, head)
    peft_model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(run(loaded, head), run(peft_model, head))
    # A bias that the guard does not have, or the shape of the weight: whichever PEFT comes to first.
    with pytest.raises((KeyError, RuntimeError), match=r"self\.query\.bias|size mismatch for .*SelfAttention\.q\."):
        PeftModel.from_pretrained(build(head), tmp_path / "adapter")


def test_a_stock_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotPatchedError, match=r"holds no synthesized attention.*patch_model\(\)"):
        lora_config_for(build(BERT))
    model = patch_model(build(BERT), "dot_product")
    get_peft_model(model, lora_config_for(model, r=2)).save_pretrained(tmp_path)
    with pytest.raises(
        NotPatchedError, match="holds no synthesized attention.*the adapter was trained on a patched one"
    ):
        load_lora(build(BERT), tmp_path)


@pytest.mark.parametrize("other", ["dot_product", "random", "dense+salience", {0: "dense"}], ids=str)
@pytest.mark.parametrize("variant", ["dense", "factorized_random+dot_product"])
def test_a_base_that_is_patched_in_another_way_is_refused(tmp_path: Path, variant: str, other: Any) -> None:
    model = patch_model(build(BERT), variant)
    get_peft_model(model, lora_config_for(model, r=2)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="does not fit.*patched in another way.*adapter_config.json"):
        load_lora(patch_model(build(BERT), other), tmp_path)
    load_lora(patch_model(build(BERT), variant), tmp_path)


def with_prefix(model: Any, task: str) -> Any:
    """The model under three trained tokens, the same ones for each model."""
    torch.manual_seed(3)
    return get_peft_model(model, PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).eval()


TASKS = {BERT: "SEQ_CLS", "BertLMHeadModel": "CAUSAL_LM", T5: "SEQ_2_SEQ_LM"}


@pytest.mark.feature("prefix tuning")
@pytest.mark.parametrize("variant", ["dot_product", "random+dot_product"])
@pytest.mark.parametrize("head", TASKS)
def test_prefix_tuning_where_tokens_are_compared(head: str, variant: str) -> None:
    """With new parts at zero, the patched model computes what the stock one does under the same prefix."""
    width = {"d_kv": 8} if head == T5 else {}  # PEFT wants heads that fill the model's width
    model, inputs = build(head, **width), batch(head)
    expected = first_output(with_prefix(copy.deepcopy(model), TASKS[head])(**inputs))
    mixing = {"mixing": "sum"} if "+" in variant else {}
    peft_model = with_prefix(patch_model(model, variant, **mixing), TASKS[head])
    found = first_output(peft_model(**inputs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.pow(2).mean().backward()
    assert peft_model.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0


@pytest.mark.feature("prefix tuning", refused=True)
@pytest.mark.parametrize("variant", ["random", "dense", "random+salience", "dot_product+salience"])
@pytest.mark.parametrize("head", TASKS)
def test_prefix_tuning_of_layers_without_keys_is_refused(head: str, variant: str) -> None:
    width = {"d_kv": 8} if head == T5 else {}
    peft_model = with_prefix(patch_model(build(head, **width), variant), TASKS[head])
    with pytest.raises(UnsupportedModelError, match="prefix tuning.*dot_product, its mixtures without salience"):
        peft_model(**batch(head))


@pytest.mark.parametrize("head", [BERT, T5])
def test_patching_what_has_adapters_is_refused(head: str) -> None:
    peft_model = get_peft_model(build(head), LoraConfig(target_modules=["value" if head == BERT else "v"]))
    expected = run(peft_model, head)
    for model in (peft_model.base_model.model, peft_model.get_base_model()):
        with pytest.raises(UnsupportedModelError, match="has adapters of PEFT.*Patch first, then add adapters.*merge"):
            patch_model(model, "random")
    assert torch.equal(run(peft_model, head), expected)
    patch_model(peft_model.merge_and_unload(), "random")


ANOTHER = {
    "stride": (("sparse_strided", {"stride": 2}), ("sparse_strided", {"stride": 8}), "stride is 2, here it is 8"),
    "variant": (("lsh_simple", {}), ("alsh_xbox", {}), "variant is 'lsh_simple', here it is 'alsh_xbox'"),
    "dot_product": (("dot_product", {}), ("sparse_fixed", {}), "variant is 'dot_product', here it is 'sparse_fixed'"),
}


@pytest.mark.parametrize(("theirs", "ours", "message"), ANOTHER.values(), ids=ANOTHER)
def test_a_base_of_the_same_shapes_that_is_patched_in_another_way_is_refused(
    tmp_path: Path, theirs: Any, ours: Any, message: str
) -> None:
    model = patch_model(build(BERT), theirs[0], **theirs[1])
    get_peft_model(model, lora_config_for(model, r=2)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=rf"does not fit.*{message}"):
        load_lora(patch_model(build(BERT), ours[0], **ours[1]), tmp_path)
    with pytest.raises(CheckpointMismatchError, match=message):
        PeftModel.from_pretrained(patch_model(build(BERT), ours[0], **ours[1]), tmp_path)


@pytest.mark.parametrize("targets", [["query", "value"], "all-linear", r".*\.(query|value)"], ids=str)
def test_targets_of_ones_own_pass_over_guards(tmp_path: Path, targets: Any) -> None:
    model = patch_model(build(BERT), "dot_product", layers=[0])
    peft_model = get_peft_model(model, lora_config_for(model, r=2, target_modules=targets))
    names = {name for name, _ in peft_model.named_modules()}
    assert any(name.endswith("0.attention.self.synthesizer.query.lora_A") for name in names)
    assert not any(name.endswith("0.attention.self.query.lora_A") for name in names)
    assert any(name.endswith("1.attention.self.query.lora_A") for name in names)
