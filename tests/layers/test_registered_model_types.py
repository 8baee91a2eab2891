"""The layer classes that Transformers sees: signatures, backends, outputs, checkpointing, dtypes, compilation."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention

from hf_synthesizer import SynthesizerBertSelfAttention, SynthesizerT5Attention, patch_model
from hf_synthesizer.layers.guard import Guard
from tests.helpers.layers import LAYER_CLASSES, OF_TEXT
from tests.helpers.models import (
    CHOOSING,
    VARIANTS,
    batch,
    bert_config,
    build,
    first_output,
    matrix,
    of_tokens,
    t5_config,
)
from tests.synthesizers.test_laws import randomize_synthesizers

HEADS = ("BertForSequenceClassification", "T5ForConditionalGeneration")
WITH_SDPA = tuple(head for head in LAYER_CLASSES if not head.startswith("MPNet"))
CHECKPOINTING = tuple(head for head in LAYER_CLASSES if getattr(transformers, head).supports_gradient_checkpointing)
WITHOUT_PARAMETERS = ("fixed_random", "dot_product")
"""Of their own: where the stock forward makes the dot products, it has its own projections."""
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
"""What configs call the share of weights that are dropped."""


def patched(head: str, variant: str, **changes):
    model = patch_model(build(head, **changes), variant)
    randomize_synthesizers(model)
    return model


def parameters(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("drop_in", [SynthesizerBertSelfAttention, SynthesizerT5Attention])
def test_forward_signatures_are_the_stock_ones(drop_in: type) -> None:
    assert parameters(drop_in.forward) == parameters(drop_in.stock_class.forward)


def test_drop_in_classes_are_built_like_the_stock_ones() -> None:
    hidden_states = torch.randn(2, 5, 24)
    ours = SynthesizerBertSelfAttention(bert_config(attn_implementation="eager"), layer_idx=1, synthesizer="dense")
    stock = BertSelfAttention(bert_config(attn_implementation="eager"), layer_idx=1)
    assert isinstance(ours, BertSelfAttention) and isinstance(ours.query, Guard)
    assert [t.shape for t in ours.eval()(hidden_states)] == [t.shape for t in stock.eval()(hidden_states)]
    ours = SynthesizerT5Attention(
        t5_config(attn_implementation="eager"), has_relative_attention_bias=True, layer_idx=0, synthesizer="random"
    )
    stock = T5Attention(t5_config(attn_implementation="eager"), has_relative_attention_bias=True, layer_idx=0)
    assert isinstance(ours, T5Attention) and isinstance(ours.q, Guard)
    assert [t.shape for t in ours.eval()(hidden_states)] == [t.shape for t in stock.eval()(hidden_states)]


@pytest.mark.feature("eager and sdpa backends")
@matrix(*HEADS, layers=WITH_SDPA, padding=["none", "right", "left", "full"])
def test_backends_agree(variant: str, head: str, padding: str) -> None:
    model, inputs = patched(head, variant), batch(head, padding=padding)
    with torch.no_grad():
        outputs = []
        for backend in ("eager", "sdpa"):
            model.set_attn_implementation(backend)
            outputs.append(first_output(model(**inputs)))
    rows = slice(None, -1) if padding == "full" else slice(None)
    outputs = [visible(output, inputs) if head in LAYER_CLASSES else output[rows] for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert all(output.isfinite().all() for output in outputs)


def visible(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What stands at tokens that are no padding; of rows that are nothing else, nothing."""
    keep = inputs.get("attention_mask")
    if keep is None:
        return output
    if output.shape[:2] == keep.shape:
        return output[keep.bool()]
    return output[keep.any(-1)]


@pytest.mark.feature("output_attentions")
@matrix(*HEADS)
def test_recorded_attentions_and_hidden_states(variant: str, head: str) -> None:
    model, inputs = patched(head, variant), batch(head)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    prefix = "encoder_" if "encoder_attentions" in out else ""
    attentions, hidden_states = out[f"{prefix}attentions"], out[f"{prefix}hidden_states"]
    assert len(attentions) == 2 and len(hidden_states) == 3
    for weights in attentions:
        heads = weights.shape[1]
        assert weights.shape == (3, heads, 8, 8) and heads == getattr(model.config, "num_attention_heads", 3)
        seen = (weights > 0).any(-1) if variant in CHOOSING else torch.ones(3, heads, 8)  # padding chooses no keys
        assert seen[0].all()
        torch.testing.assert_close(weights.sum(-1), seen.float())
        if "attention_mask" in inputs:
            assert weights[2, :, :, 6:].max() == 0  # padding
    if prefix:
        assert len(out.decoder_attentions) == len(out.cross_attentions) == 2
        assert out.decoder_attentions[0].triu(1).max() == 0


@pytest.mark.parametrize("head", HEADS)
def test_sdpa_records_no_attentions_as_in_stock_models(head: str) -> None:
    model, inputs = patched(head, "random"), batch(head)
    name = "encoder_attentions" if head.startswith("T5") else "attentions"
    assert not model(**inputs, output_attentions=True)[name]
    assert not build(head)(**inputs, output_attentions=True)[name]


@matrix(*HEADS)
def test_return_dict_false(variant: str, head: str) -> None:
    model, inputs = patched(head, variant), batch(head)
    with torch.no_grad():
        assert torch.equal(model(**inputs, return_dict=False)[0], first_output(model(**inputs)))


@matrix(*HEADS, layers=OF_TEXT)
def test_inputs_embeds(variant: str, head: str) -> None:
    model, inputs = patched(head, variant), batch(head)
    with torch.no_grad():
        expected = first_output(model(**inputs))
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        torch.testing.assert_close(first_output(model(inputs_embeds=embeds, **inputs)), expected)


@pytest.mark.feature("gradient checkpointing")
@matrix(*HEADS, layers=CHECKPOINTING, reentrant=[True, False])
def test_gradient_checkpointing(variant: str, head: str, reentrant: bool) -> None:
    model, inputs = patched(head, variant), batch(head)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        else:
            vars(module).update({name: 0.0 for name in ("dropout", "attention_dropout") if name in vars(module)})
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            if "input_ids" in inputs:
                model.enable_input_require_grads()
        model.zero_grad()
        settings = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        first_output(model(**inputs, **settings)).pow(2).mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert any("synthesizer" in name for name in grads[0]) or variant in WITHOUT_PARAMETERS
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-5)


@matrix(*HEADS, backend=["eager", "sdpa"])
def test_attention_dropout_acts_in_training_alone(variant: str, head: str, backend: str) -> None:
    rates = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    if head in LAYER_CLASSES:
        named = [
            name for name, value in vars(build(head).config).items() if "drop" in name and isinstance(value, float)
        ]
        rates = {name: 0.5 if name in ATTENTION_DROPOUTS else 0.0 for name in named}
    elif head.startswith("T5"):
        rates = {"dropout_rate": 0.5}
    model, inputs = patched(head, variant, **rates), batch(head)
    if backend == "eager" or head not in LAYER_CLASSES or head in WITH_SDPA:
        model.set_attn_implementation(backend)
    with torch.no_grad():
        assert torch.equal(first_output(model(**inputs)), first_output(model(**inputs)))
        model.train()
        assert not torch.equal(first_output(model(**inputs)), first_output(model(**inputs)))


def test_dropout_keeps_the_mean() -> None:
    model = patched(
        "BertModel", "dense", attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0, num_hidden_layers=1
    )
    module = model.encoder.layer[0].attention.self
    hidden_states = torch.randn(1, 8, 24)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            expected = module.eval()(hidden_states)[0]
            mean = torch.stack([module.train()(hidden_states)[0] for _ in range(1500)]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.08)


@pytest.mark.feature("bfloat16")
@matrix(*HEADS, backend=["eager", "sdpa"])
def test_bfloat16(variant: str, head: str, backend: str) -> None:
    small = {name: 0.1 for name in ("initializer_range", "init_std") if hasattr(build(head).config, name)}
    model, inputs = build(head, **small), batch(head)
    patch_model(model, variant)
    if backend == "eager" or head not in LAYER_CLASSES or head in WITH_SDPA:
        model.set_attn_implementation(backend)
    with torch.no_grad():
        expected = first_output(model(**inputs))
        inputs = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        half = first_output(model.to(torch.bfloat16)(**inputs))
    assert half.dtype == torch.bfloat16
    scale = expected.abs().max().item()
    torch.testing.assert_close(half.float(), expected, rtol=5e-2, atol=5e-2 * scale)


@pytest.mark.feature("autocast")
@matrix(*HEADS)
def test_autocast_trains(variant: str, head: str) -> None:
    model, inputs = patched(head, variant).train(), batch(head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = first_output(model(**inputs)).float().pow(2).mean()
    loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "synthesizer" in name]
    assert grads or variant in WITHOUT_PARAMETERS
    assert all(grad is not None and grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@pytest.mark.feature("torch.compile in one graph")
@pytest.mark.parametrize(("head", "padding"), [("BertModel", "right"), ("T5EncoderModel", "none")])
def test_compiles_as_one_graph(variant: str, head: str, padding: str) -> None:
    model, inputs = patched(head, variant), batch(head, padding=padding)
    if padding == "none":
        del inputs["attention_mask"]
    assert_compiles(model, inputs)


@pytest.mark.parametrize("head", LAYER_CLASSES)
def test_each_layer_class_compiles_as_one_graph(head: str) -> None:
    assert_compiles(patched(head, "random"), batch(head))


def assert_compiles(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = (of_tokens(first_output(called(**inputs)), inputs) for called in (model, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compiler
@pytest.mark.parametrize("variant", ["random", "dense+salience", "factorized_dense"])
def test_compiles_with_inductor_and_trains(variant: str) -> None:
    torch._dynamo.reset()
    model, inputs = patched("BertForSequenceClassification", variant), batch("BertForSequenceClassification")
    expected = model(**inputs).logits
    expected.pow(2).mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    actual = torch.compile(model, fullgraph=True)(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    actual.pow(2).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-4)


@matrix(*HEADS)
def test_inference_mode_equals_no_grad(variant: str, head: str) -> None:
    model = patched(head, variant)
    for padding in ("none", "right", "left"):
        inputs = batch(head, padding=padding)
        with torch.no_grad():
            expected = first_output(model(**inputs))
        with torch.inference_mode():
            assert torch.equal(first_output(model(**inputs)), expected)


@pytest.mark.parametrize("head", ["BertModel", "T5EncoderModel"])
def test_a_band_mask_moves_no_positions(head: str) -> None:
    """The last query does not see the first keys, but they are no padding for that."""
    model = patched(head, "random")
    places = torch.arange(7)
    band = ((places[:, None] - places).abs() <= 1)[None, None]  # (1, 1, L, L)
    layer = next(module for module in model.modules() if hasattr(module, "synthesizer"))
    value = layer.get_submodule(layer.projection_names.value)
    hidden = torch.randn(2, 7, 24)
    table = layer.synthesizer.table[:, :7, :7]
    if head == "T5EncoderModel":
        table = table + layer.compute_bias(7, 7)
    weights = table.masked_fill(~band, float("-inf")).softmax(-1)
    values = value(hidden).view(2, 7, 3, -1).transpose(1, 2)
    expected = (weights @ values).transpose(1, 2).flatten(2)
    expected = layer.o(expected) if head == "T5EncoderModel" else expected
    torch.testing.assert_close(layer(hidden, band.expand(2, -1, -1, -1))[0], expected, rtol=1e-4, atol=1e-5)


def test_variants_and_model_types_are_what_the_tests_think() -> None:
    assert len(VARIANTS) == 18 and len(CHOOSING) == 7


def test_t5_block_zero_hands_on_the_position_bias() -> None:
    """A patched first block computes the bias for the stock blocks after it: one number would change otherwise."""
    stock, inputs = build("T5EncoderModel"), batch("T5EncoderModel")
    expected = stock(**inputs).last_hidden_state
    model = patch_model(stock, "dot_product", layers=[0])
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(3)
    assert (model(**inputs).last_hidden_state - expected).abs().max() > 1e-3
