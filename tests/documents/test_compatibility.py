"""Features of Transformers for the kinds of variant that no other test holds them for, and the matrix that comes of all tests."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Cache, PreTrainedModel, pipeline

from hf_synthesizer import (
    FusedModelError,
    SynthesizerConfig,
    SynthesizerError,
    UnsupportedModelError,
    fuse_for_inference,
    patch_model,
    transfer_attention,
    unfuse,
    unpatch_model,
)
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.peft import lora_config_for
from tests.helpers.features import KINDS
from tests.helpers.models import batch, build, first_output, mask
from tests.helpers.word_tokenizer import save_tokenizer
from tests.inference.test_export import assert_traces, export, inputs, logits, onnx_matches_torch, quantize_with_torch
from tests.layers.test_decoding import FourBits, generate
from tests.patching.test_quantized import quantized
from tests.synthesizers.test_laws import randomize_synthesizers
from tests.training.test_trainer import make_trainer

ROOT = Path(__file__).parents[2]
ENCODER, DECODER = "BertForSequenceClassification", "BertLMHeadModel"
SPECS: dict[str, Any] = {
    "tables": "factorized_random",
    "rows": "factorized_dense",
    "distances": {
        0: SynthesizerConfig("relative+salience", max_distance=4),
        1: SynthesizerConfig("relative_dense", max_distance=4, window=5, sinks=2),
    },
    "mixtures": "dense+salience",
    "dot products": "random+dot_product",
    "patterns": "sparse_fixed",
    "choices": {0: SynthesizerConfig("lsh_simple", bucket_size=4), 1: "routing"},
    "hybrids": {0: "random", 1: "dense+salience"},
    "heads": {0: [SynthesizerConfig("random+salience", heads=[0]), SynthesizerConfig("dense", heads=[2])]},
}
COMPARING = ("patterns", "choices")


def patched(kind: str, head: str = ENCODER, **changes: Any) -> PreTrainedModel:
    model = patch_model(build(head, **changes), SPECS[kind])
    randomize_synthesizers(model)
    return model


def kinds(*names: str, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """These, or all."""
    return pytest.mark.parametrize("kind", [kind for kind in names or KINDS if kind not in without])


@torch.no_grad()
def outputs(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return first_output(model(**given))


# ---- saving ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("save_pretrained and the Auto classes")
@pytest.mark.feature("pipeline")
@kinds()
def test_a_saved_model_is_loaded_by_auto_classes_and_pipelines(kind: str, tmp_path: Path) -> None:
    model, given = patched(kind), batch(ENCODER)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, given), outputs(model, given))
    classify = pipeline("text-classification", str(tmp_path))
    expected = outputs(model, dict(classify.tokenizer("w5 w6 w7", return_tensors="pt"))).softmax(-1).max()
    assert classify("w5 w6 w7")[0]["score"] == pytest.approx(expected.item())


@pytest.mark.feature("deepcopy and pickle")
@kinds("distances", "choices", "hybrids", "heads")
def test_a_copy_and_a_pickle_compute_the_same(kind: str) -> None:
    model, given = patched(kind), batch(ENCODER)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(again, given), outputs(model, given))


@pytest.mark.feature("unpatch_model")
@kinds(without=("heads",))
def test_unpatching_gives_back_the_stock_model(kind: str) -> None:
    model, given = build(ENCODER), batch(ENCODER)
    expected, stock = outputs(model, given), type(model)
    unpatch_model(patch_model(model, SPECS[kind]))
    assert torch.equal(outputs(model, given), expected) and type(model) is stock


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("Trainer")
@kinds()
def test_a_trainer_moves_the_synthesizers(kind: str, tmp_path: Path) -> None:
    model = patched(kind)
    start = {name: tensor.clone() for name, tensor in model.named_parameters()}
    trainer = make_trainer(model, tmp_path, max_steps=2, save_strategy="no")
    assert 0 < trainer.train().training_loss < 20 and trainer.evaluate()["eval_loss"] > 0
    moved = [name for name, tensor in model.named_parameters() if not torch.equal(tensor, start[name])]
    assert any(".synthesizer." in name for name in moved)


@pytest.mark.feature("gradient checkpointing")
@kinds("distances", "choices", "hybrids")
def test_gradient_checkpointing_changes_no_gradient(kind: str) -> None:
    model = patched(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    given, gradients = {**batch(ENCODER), "labels": torch.tensor([0, 1, 0])}, []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**given).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


@pytest.mark.feature("autocast")
@kinds("distances", "choices", "hybrids", "heads")
def test_autocast_trains_what_is_new(kind: str) -> None:
    model = patched(kind)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(ENCODER), labels=torch.tensor([0, 1, 0])).loss
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if ".synthesizer." in name and p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.feature("bfloat16")
@kinds("distances", "choices", "hybrids", "heads")
def test_bfloat16_is_near_float32(kind: str) -> None:
    model = patched(kind).bfloat16()  # the choice of keys is made of the same rounded numbers in both
    given, near = batch(ENCODER), copy.deepcopy(model).float()
    found, expected = outputs(model, given), outputs(near, given)
    assert found.dtype == torch.bfloat16
    assert torch.cosine_similarity(found.float().flatten(), expected.flatten(), dim=0) > 0.95


@pytest.mark.feature("transfer_attention")
@kinds("distances", "heads")
def test_a_teacher_teaches_some_heads_and_distances(kind: str) -> None:
    teacher = build(ENCODER)
    model = patch_model(copy.deepcopy(teacher), SPECS[kind])
    rows = [{name: tensor[0] for name, tensor in batch(ENCODER).items()} for _ in range(8)]
    report = transfer_attention(model, teacher, DataLoader(rows, batch_size=4), steps=8)
    assert all(layer.after < layer.before for layer in report.layers)


# ---- routes ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("torch.compile in one graph")
@kinds("distances", "hybrids")
def test_a_model_is_compiled_as_one_graph(kind: str) -> None:
    model, given = patched(kind), batch(ENCODER)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs(compiled, given), outputs(model, given), rtol=1e-4, atol=1e-5)


@pytest.mark.feature("eager and sdpa backends")
@pytest.mark.feature("output_attentions")
@kinds("distances", "choices", "hybrids")
def test_backends_agree_and_eager_records_weights(kind: str) -> None:
    model, given = patched(kind), batch(ENCODER)
    expected = outputs(model, given)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        recorded = model(**given, output_attentions=True)
    torch.testing.assert_close(recorded.logits, expected, rtol=1e-4, atol=1e-4)
    assert all(weights.shape == (3, 3, 8, 8) for weights in recorded.attentions)
    visible = given["attention_mask"].bool()[:, None].expand(3, 3, 8)  # a row of padding may look at nothing
    sums = recorded.attentions[0].sum(-1)[visible]
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.feature("flash and flex backends", refused=True)
@pytest.mark.parametrize("backend", ["flash_attention_2", "flex_attention"])
@kinds()
def test_backends_that_only_compare_tokens_are_refused(kind: str, backend: str) -> None:
    model = patched(kind)
    model.config._attn_implementation = backend
    with pytest.raises(UnsupportedModelError, match=f"this model asks for '{backend}'"):
        model(**batch(ENCODER))


@pytest.mark.feature("cross-attention", refused=True)
@kinds()
def test_states_of_an_encoder_are_refused(kind: str) -> None:
    model = patched(kind, "T5EncoderModel")
    layer = next(module for module in model.modules() if isinstance(module, SynthesizerMixin))
    with pytest.raises(UnsupportedModelError, match="self-attention only"):
        layer(torch.randn(1, 3, 24), key_value_states=torch.randn(1, 4, 24))


# ---- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("generate with a cache")
@pytest.mark.feature("generate from left-padded rows")
@kinds("distances", "hybrids")
def test_generation_from_left_padded_rows_equals_row_by_row(kind: str) -> None:
    model, ids = patched(kind, DECODER), torch.randint(2, 64, (3, 6))
    together = generate(model, ids, attention_mask=mask(3, 6, "left"), do_sample=False)
    for row in range(3):
        alone = generate(model, ids[row : row + 1, row:], do_sample=False, use_cache=False)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.feature("static cache")
@kinds("distances", "dot products", "patterns", "hybrids")
def test_a_static_cache_changes_nothing(kind: str) -> None:
    model, ids = patched(kind, DECODER), torch.randint(2, 64, (3, 6))
    static = generate(model, ids, cache_implementation="static", do_sample=False)
    assert torch.equal(static, generate(model, ids, use_cache=False, do_sample=False))


@pytest.mark.feature("quantized cache")
@kinds("distances", "patterns", "hybrids", "heads")
def test_a_quantized_cache_changes_little(kind: str) -> None:
    model, ids = patched(kind, DECODER), torch.randint(2, 64, (3, 5))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
        cache = Cache(layers=[FourBits() for _ in range(2)])
        first = model(input_ids=ids[:, :4], past_key_values=cache, use_cache=True)
        step = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values).logits[:, 0]
    assert torch.cosine_similarity(step.flatten(), expected.flatten(), dim=0) > 0.9  # four bits


@pytest.mark.feature("continuous batching", refused=True)
@kinds(without=("choices",))
def test_continuous_batching_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="continuous batching"):
        patched(kind, DECODER).generate_batch([[3, 4, 5], [6, 7, 8, 9]], max_new_tokens=3)


@pytest.mark.feature("generate from left-padded rows", refused=True)
@pytest.mark.feature("continuous batching", refused=True)
@kinds("choices")
def test_what_looks_at_whole_sequences_never_becomes_a_decoder(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="chooses its keys over the whole sequence"):
        patched(kind, DECODER)


# ---- adapters, fusing, export ------------------------------------------------------------------------------------


@pytest.mark.feature("LoRA")
@kinds("distances", "choices", "hybrids")
def test_lora_trains_the_synthesizers_beside_its_adapters(kind: str) -> None:
    model = patched(kind)
    adapted = get_peft_model(model, lora_config_for(model, r=2))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert any(".synthesizer." in name for name in trained) and any("lora_A" in name for name in trained)
    adapted(**batch(ENCODER), labels=torch.tensor([0, 1, 0])).loss.backward()


@pytest.mark.feature("prefix tuning")
@kinds(*COMPARING)
def test_a_prefix_is_tokens_in_front_that_queries_may_choose(kind: str) -> None:
    model = get_peft_model(patched(kind), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    found = first_output(model(**batch(ENCODER)))
    found.pow(2).sum().backward()
    assert model.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0


@pytest.mark.feature("prefix tuning", refused=True)
@kinds("distances", "hybrids", "heads")
def test_a_prefix_that_layers_have_no_place_for_is_refused(kind: str) -> None:
    model = get_peft_model(patched(kind), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    with pytest.raises(SynthesizerError):
        model(**batch(ENCODER))


@pytest.mark.feature("fuse_for_inference")
@kinds("hybrids")
def test_what_can_be_computed_once_is(kind: str) -> None:
    model, given = patched(kind), batch(ENCODER)
    expected = outputs(model, given)
    fuse_for_inference(model)
    torch.testing.assert_close(outputs(model, given), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(outputs(unfuse(model), given), expected)


@pytest.mark.feature("fuse_for_inference", refused=True)
@kinds("distances", "rows", *COMPARING)
def test_where_everything_depends_on_the_input_there_is_nothing_to_fuse(kind: str) -> None:
    with pytest.raises(FusedModelError, match="Nothing to fuse"):
        fuse_for_inference(patched(kind))


@pytest.mark.feature("torch.export")
@kinds("distances", "hybrids")
def test_a_model_is_exported_with_dynamic_shapes(kind: str) -> None:
    model = patched(kind)
    exported, given = export(model).module(), inputs(2, 5)
    torch.testing.assert_close(logits(exported, given), logits(model, given), rtol=1e-4, atol=1e-5)


@pytest.mark.feature("torch.jit.trace")
@kinds("distances", "hybrids", "heads")
def test_a_model_is_traced(kind: str) -> None:
    assert_traces(SPECS[kind])


@pytest.mark.slow
@pytest.mark.feature("ONNX")
@kinds("distances", "hybrids", "heads")
def test_onnxruntime_computes_the_same(kind: str, tmp_path: Path) -> None:
    onnx_matches_torch(SPECS[kind], tmp_path / "model.onnx")


@pytest.mark.feature("int8 of the linear layers")
@kinds("distances", "choices", "hybrids", "heads")
def test_linear_layers_take_int8(kind: str) -> None:
    model, given = patched(kind), batch(ENCODER)
    found = outputs(quantize_with_torch(model), given)
    assert torch.cosine_similarity(found.flatten(), outputs(model, given).flatten(), dim=0) > 0.9


@pytest.mark.feature("patching a quantized model")
@kinds("distances", "hybrids")
def test_a_quantized_model_is_patched(kind: str) -> None:
    model = patch_model(quantized(ENCODER, "like_torchao"), SPECS[kind])
    assert outputs(model, batch(ENCODER)).isfinite().all()


@pytest.mark.feature("patching a quantized model", refused=True)
@kinds("heads")
def test_rows_of_a_quantized_projection_cannot_be_cut_out(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="quantized"):
        patch_model(quantized(ENCODER, "like_bitsandbytes"), SPECS[kind])


# ---- the matrix --------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_markers_say() -> None:
    command = [sys.executable, "-m", "docs.compatibility", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert "no test" not in page and page.count("[works]") > 100 and page.count("[refused]") > 30
