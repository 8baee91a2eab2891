"""Models whose heads differ: every layer class, caches, checkpoints, adapters, compilers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    DynamicCache,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    ModernBertConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hf_synthesizer import (
    CheckpointMismatchError,
    SynthesizerConfig,
    fuse_for_inference,
    patch_model,
    unfuse,
    unpatch_model,
)
from hf_synthesizer.peft import lora_config_for
from tests.helpers.models import MAX_LENGTH, MIXTURES, batch, build, first_output, mask, randomize
from tests.synthesizers.test_head_groups import spec
from tests.synthesizers.test_laws import randomize_synthesizers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": MAX_LENGTH, **TOKENS}
DECODERS = {
    "bert": lambda: build("BertLMHeadModel", num_attention_heads=4),
    "llama": lambda: LlamaConfig(num_key_value_heads=2, **SIZES),
    "qwen3": lambda: Qwen3Config(num_key_value_heads=2, head_dim=16, **SIZES),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=MAX_LENGTH, **TOKENS),
    "neox": lambda: GPTNeoXConfig(**SIZES),
    "opt": lambda: OPTConfig(
        ffn_dim=48, word_embed_proj_dim=32, **{k: v for k, v in SIZES.items() if k != "intermediate_size"}
    ),
}
GROUPS = [("random+salience", [0, 3]), ("dense", [2])]


def causal_model(name: str) -> PreTrainedModel:
    made = DECODERS[name]()
    if not isinstance(made, PreTrainedModel):
        made = AutoModelForCausalLM.from_config(made)
    for parameter in made.parameters():  # a fresh model is nearly the same whatever it attends to
        parameter.data.mul_(3) if parameter.dim() > 1 else None
    return made.eval()


@pytest.mark.parametrize("name", DECODERS)
def test_heads_that_no_group_names_attend_as_before(name: str) -> None:
    model = causal_model(name)
    model.set_attn_implementation("eager")
    ids, keep = torch.randint(3, 64, (3, 9)), mask(3, 9, "left")
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=keep, output_attentions=True)
        named = patch_model(copy.deepcopy(model), spec([("dot_product", [0, 2])]))
        same = named(input_ids=ids, attention_mask=keep)
        torch.testing.assert_close(same.logits[keep.bool()], wanted.logits[keep.bool()], rtol=1e-4, atol=1e-4)
        patched = patch_model(model, spec(GROUPS))
        randomize_synthesizers_but_stock(patched)
        found = patched(input_ids=ids, attention_mask=keep, output_attentions=True)
    rows = keep.bool()
    for head, same in ((0, False), (1, True), (2, False), (3, False)):
        first, stock = (out.attentions[0][:, head][rows] for out in (found, wanted))
        assert torch.allclose(first, stock, atol=1e-5) is same


def randomize_synthesizers_but_stock(model: PreTrainedModel) -> None:
    """Random numbers for what is new, so that nothing hides behind near-uniform weights."""
    for module in model.modules():
        if hasattr(module, "synthesizer"):
            for _, _, group in module.synthesizer.members():
                if not group.is_stock:
                    randomize(group)


@pytest.mark.feature("static cache", kinds=["heads"])
@pytest.mark.feature("generate from left-padded rows", kinds=["heads"])
@pytest.mark.feature("generate with a cache", kinds=["heads"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_and_without_a_cache_and_with_left_padding(name: str, implementation: str) -> None:
    model = patch_model(causal_model(name), spec(GROUPS))
    randomize_synthesizers_but_stock(model)
    ids = torch.randint(3, 64, (2, 5))
    settings: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(ids, use_cache=False, **settings)
    cached = {} if implementation == "dynamic" else {"cache_implementation": implementation}
    assert torch.equal(model.generate(ids, **cached, **settings), whole)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    keep = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    assert torch.equal(model.generate(padded, attention_mask=keep, **cached, **settings)[:, 8:], whole[:, 5:])


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "neox", "opt"])
def test_a_decoder_with_nine_heads_in_ten_synthesized_keeps_little(name: str) -> None:
    """Twenty heads, two of which compare tokens; where heads share keys (Llama), two that share theirs."""
    sizes = {"hidden_size": 320, "num_attention_heads": 20}
    if name == "bert":
        model = build("BertLMHeadModel", num_hidden_layers=1, **sizes)
    else:
        config = DECODERS[name]()
        if name == "gpt2":
            config.n_embd, config.n_head, config.n_layer = 320, 20, 1
        else:
            for key, value in {**sizes, "num_hidden_layers": 1}.items():
                setattr(config, key, value)
        if name == "llama":
            config.num_key_value_heads, config.head_dim = 10, 16
        if name == "opt":
            config.word_embed_proj_dim = 320
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 64, (2, 9))

    def kept() -> int:
        with torch.no_grad():
            layers = model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values.layers
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    stock = kept()
    patch_model(model, SynthesizerConfig("random", heads=[head for head in range(20) if head not in (10, 11)]))
    assert kept() <= 0.6 * stock


def test_projections_are_kept_for_the_comparing_heads_alone() -> None:
    stock = build("BertModel", num_attention_heads=4)
    before = copy.deepcopy(stock.encoder.layer[0].attention.self)
    layer = patch_model(stock, spec([("random", [0, 2])])).encoder.layer[0].attention.self
    rows = [*range(6, 12), *range(18, 24)]
    assert torch.equal(layer.synthesizer.groups["stock"].query.weight, before.query.weight[rows])
    assert torch.equal(layer.synthesizer.groups["stock"].key.bias, before.key.bias[rows])
    for name, width in (("gpt2", 32), ("opt", 32)):
        layers = patch_model(causal_model(name), spec([("random", [0, 1, 2])])).modules()
        layer = next(module for module in layers if hasattr(module, "synthesizer"))
        assert layer.synthesizer.groups["stock"].key.weight.shape == (8, width)
        assert not type(layer).__name__.endswith("WithStockForward")
    llama = patch_model(causal_model("llama"), spec([("random", [0, 1, 2])])).model.layers[0].self_attn
    assert llama.q_proj.weight.shape == (8, 32) and llama.stock.k_proj.weight.shape == (8, 32)
    assert llama.v_proj.weight.shape == (16, 32)


def test_one_projection_of_all_three_is_cut_for_the_comparing_heads_as_well() -> None:
    """One comparing head of four, eight wide: 24 rows of queries, keys and values, and the other heads' values beside them."""
    modernbert = AutoModel.from_config(
        ModernBertConfig(local_attention=8, **SIZES, cls_token_id=1, sep_token_id=2)
    ).eval()
    for model, name in ((causal_model("neox"), "query_key_value"), (modernbert, "Wqkv")):
        ids = torch.randint(3, 64, (2, 9))
        model.set_attn_implementation("eager")
        with torch.no_grad():
            wanted = model(input_ids=ids, output_attentions=True).attentions[0][:, 2]
        patched = patch_model(model, spec([("random", [0, 1, 3])]))
        layer = next(module for module in patched.modules() if hasattr(module, "synthesizer"))
        assert layer.stock[name].weight.shape == (24, 32) and layer.stock.value.weight.shape == (24, 32)
        with torch.no_grad():
            found = patched(input_ids=ids, output_attentions=True).attentions[0][:, 2]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        adapted = lora_config_for(patched, r=2).target_modules
        assert f"stock.{name}" in str(adapted) and "stock.value" in str(adapted)


@pytest.mark.feature("output_attentions", kinds=["heads"])
@pytest.mark.feature("eager and sdpa backends", kinds=["heads"])
@pytest.mark.parametrize("head", ["BertModel", "T5EncoderModel", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_backends_agree_and_attentions_are_in_the_order_of_heads(head: str, padding: str) -> None:
    heads = {"num_heads": 4} if head.startswith("T5") else {"num_attention_heads": 4}
    model = patch_model(build(head, **heads), spec(GROUPS))
    randomize_synthesizers_but_stock(model)
    given = batch(head, padding=padding)
    rows = given["attention_mask"].bool()
    results = []
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            results.append(model(**given, **({"output_attentions": True} if backend == "eager" else {})))
    fast, slow = (first_output(out) for out in results)
    if fast.shape[:2] == rows.shape:
        fast, slow = fast[rows], slow[rows]
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    weights = (results[1].get("attentions") or results[1].get("encoder_attentions"))[0]  # (B, H, L, L)
    if (
        head == "BertModel" and padding == "none"
    ):  # a table and salience say the same in each row of a query: w = R + s
        table = model.encoder.layer[0].attention.self.synthesizer.groups["0"].parts.random.table
        for head_number, place in ((0, 0), (3, 1)):
            apart = weights[:, head_number].log() - table[place, :8, :8]
            apart = apart - apart.mean(-1, keepdim=True)
            torch.testing.assert_close(apart, apart[:, :1].expand_as(apart), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["bart", "vit", "distilbert", "albert", "modernbert"])
def test_encoders_of_every_kind_of_layer_class(name: str) -> None:
    from transformers import AlbertConfig, DistilBertConfig, ViTConfig

    config: Any = {
        "bart": lambda: BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_position_embeddings=MAX_LENGTH, pad_token_id=0,
        ),
        "vit": lambda: ViTConfig(image_size=8, patch_size=2, num_channels=3, **{k: SIZES[k] for k in list(SIZES)[:3]}, intermediate_size=48),
        "distilbert": lambda: DistilBertConfig(dim=32, n_layers=1, n_heads=4, hidden_dim=48, vocab_size=64, max_position_embeddings=MAX_LENGTH),
        "albert": lambda: AlbertConfig(embedding_size=16, **SIZES),
        "modernbert": lambda: ModernBertConfig(local_attention=8, **SIZES, cls_token_id=1, sep_token_id=2),
    }[name]()  # fmt: skip
    model = AutoModel.from_config(config).eval()
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if name == "vit" else {"input_ids": torch.randint(3, 64, (2, 9))}
    with torch.no_grad():
        wanted = model(**given)[0]
        same = patch_model(copy.deepcopy(model), spec([("dot_product", [1, 2])]))(**given)[0]
        torch.testing.assert_close(same, wanted, rtol=1e-4, atol=1e-5)
        patched = patch_model(model, spec(GROUPS))
        randomize_synthesizers_but_stock(patched)
        fast = patched(**given)[0]
        patched.set_attn_implementation("eager")
        torch.testing.assert_close(patched(**given)[0], fast, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(fast, wanted, atol=1e-3)


# ---- as for whole layers ------------------------------------------------------------------------------------------------


@pytest.mark.feature("unpatch_model", kinds=["heads"])
@pytest.mark.feature("save_pretrained and the Auto classes", kinds=["heads"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "neox"])
def test_saved_and_loaded_and_unpatched(tmp_path: Path, name: str) -> None:
    stock = causal_model(name)
    ids = torch.randint(3, 64, (2, 7))
    before = stock(input_ids=ids).logits
    model = patch_model(stock, {0: spec(GROUPS), 1: spec([("dense+salience", [1])])})
    randomize_synthesizers_but_stock(model)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    assert loaded.config.synthesizer == model.config.synthesizer
    for other in (spec([("random+salience", [0, 2]), ("dense", [3])]), "random"):
        with pytest.raises((CheckpointMismatchError, RuntimeError)):
            patch_model(causal_model(name), {0: other, 1: spec([("dense+salience", [1])])}).load_state_dict(
                model.state_dict()
            )
    assert torch.equal(unpatch_model(model)(input_ids=ids).logits, before)


def test_config_json_names_heads_that_the_model_does_not_have(tmp_path: Path) -> None:
    model = patch_model(build("BertModel"), {0: spec([("random", [0]), ("dense", [2])])})
    model.config.synthesizer["configs"][0]["heads"] = [7]
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="names head 7, but the layer has 3"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.feature("LoRA", kinds=["heads"])
@pytest.mark.parametrize("name", ["bert", "llama", "neox"])
def test_lora_trains_the_groups_whole_and_adapts_the_heads_that_compare(name: str) -> None:
    from peft import get_peft_model

    model = patch_model(causal_model(name), spec(GROUPS))
    ids = torch.randint(3, 64, (2, 7))
    with torch.no_grad():
        before = model(input_ids=ids).logits
    adapted = get_peft_model(model, lora_config_for(model, r=2))
    torch.testing.assert_close(adapted(input_ids=ids).logits, before)
    trained = {key for key, parameter in adapted.named_parameters() if parameter.requires_grad}
    query = {"bert": "groups.stock.query.lora_A", "neox": "stock.query_key_value.lora_A"}.get(name, "q_proj.lora_A")
    for part in ("groups.0.modules_to_save", "groups.1.modules_to_save", query):
        assert any(part in key for key in trained), part
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for key, p in adapted.named_parameters() if key in trained and "lora" not in key)


@pytest.mark.feature("torch.compile in one graph", kinds=["heads"])
@pytest.mark.parametrize("head", ["BertModel", "T5EncoderModel"])
def test_compiles_as_one_graph(head: str) -> None:
    heads = {"num_heads": 4} if head.startswith("T5") else {"num_attention_heads": 4}
    model, given = patch_model(build(head, **heads), spec(GROUPS)), batch(head)
    with torch.no_grad():
        expected = model(**given)[0]
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**given)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.feature("torch.export", kinds=["heads"])
def test_exports_with_dynamic_batch_and_length() -> None:
    model = patch_model(build("BertModel", num_attention_heads=4), spec(GROUPS))
    dynamic = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=MAX_LENGTH)}
    given = {"input_ids": torch.randint(2, 64, (3, 8)), "attention_mask": mask(3, 8, "right")}
    exported = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, dynamic)).module()
    for rows, length in ((1, 5), (2, MAX_LENGTH)):
        given = {"input_ids": torch.randint(2, 64, (rows, length)), "attention_mask": mask(rows, length, "right")}
        with torch.no_grad():
            torch.testing.assert_close(exported(**given)[0], model(**given)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.feature("gradient checkpointing", kinds=["heads"])
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_gradient_checkpointing_gives_the_same_gradients(head: str) -> None:
    heads = {"num_heads": 4} if head.startswith("T5") else {"num_attention_heads": 4}
    still = {"dropout_rate": 0.0} if head.startswith("T5") else {"hidden_dropout_prob": 0.0}
    still |= {} if head.startswith("T5") else {"attention_probs_dropout_prob": 0.0}
    model = patch_model(build(head, **heads, **still), spec(GROUPS)).train()
    randomize_synthesizers(model)
    labels = torch.tensor([0, 1, 0]) if head.startswith("Bert") else torch.randint(2, 64, (3, 6))
    given = {**{k: v for k, v in batch(head).items() if not k.startswith("decoder")}, "labels": labels}
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**given).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for module in model.modules():
            if hasattr(module, "synthesizer") and not checkpointed:
                assert all(p.grad is not None for p in module.synthesizer.parameters())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.feature("fuse_for_inference", kinds=["heads"])
def test_static_groups_are_fused_and_unfused() -> None:
    model = patch_model(build("BertModel", num_attention_heads=4), spec(GROUPS))
    randomize_synthesizers_but_stock(model)
    given = batch("BertModel")
    with torch.no_grad():
        expected = model(**given)[0]
        report = fuse_for_inference(model)
        assert "attention.self [0, 3]" in str(report)
        torch.testing.assert_close(model(**given)[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(unfuse(model)(**given)[0], expected, rtol=0, atol=0)


def test_all_mixtures_are_for_some_heads_as_well() -> None:
    for variant in MIXTURES:
        model = patch_model(build("BertModel"), variant, heads=[0, 2])
        assert torch.isfinite(first_output(model(**batch("BertModel")))).all()


@pytest.mark.feature("output_attentions", kinds=["heads"])
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_recorded_attentions_have_gradients_where_heads_differ(head: str) -> None:
    model = patch_model(build(head), [SynthesizerConfig("random", heads=[0, 2])])
    model.set_attn_implementation("eager")
    found = model(**batch(head), output_attentions=True)
    for weights in found.attentions:
        weights.retain_grad()
    first_output(found).pow(2).sum().backward()
    assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in found.attentions)
