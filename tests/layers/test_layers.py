"""Which layer class serves which attention, and what each owes: the stock signature, no queries and keys, the stock class."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

import hf_synthesizer
from hf_synthesizer import models, patch_model
from hf_synthesizer.checkpoints.auto import serving_auto_classes
from hf_synthesizer.layers import find_layer_class
from hf_synthesizer.layers.guard import Guard
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.layers.stock_forward import StockForwardLayer
from tests.helpers.layers import LAYER_CLASSES
from tests.helpers.models import batch, build, first_output

ROOT = Path(__file__).resolve().parents[2]
PROMISED = {
    "BertLayer": "BertSelf RobertaSelf XLMRobertaSelf CamembertSelf ElectraSelf ErnieSelf",
    "T5Layer": "T5 MT5 LongT5 SwitchTransformers",
    "PlainLayer": "DistilBertSelf LayoutLMSelf ViT DeiT Dinov2 Siglip CLIP",
    "AlbertLayer": "Albert",
    "EsmLayer": "EsmSelf",
    "MPNetLayer": "MPNetSelf",
    "BartLayer": "Bart MBart Marian Pegasus Blenderbot M2M100",
    "WhisperLayer": "Whisper Speech2Text",
    "SpeechEncoderLayer": "Wav2Vec2 Hubert",
    "RotaryDecoderLayer": "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Olmo Olmo2 Phi SmolLM3 Granite Cohere EuroBert",
    "MaskFirstDecoderLayer": "GraniteMoeHybrid",
    "PositionedDecoderLayer": "Qwen2VL",
    "StableLmLayer": "StableLm",
    "RotaryEncoderLayer": "ModernBert",
    "MaskFirstEncoderLayer": "NomicBert JinaEmbeddingsV3 Gte",
    "Gpt2Layer": "GPT2",
    "OptLayer": "OPT",
    "GptNeoXLayer": "GPTNeoX",
}
"""What comes between "Synthesizer" and "Attention" in the names of the attention classes that have a layer class of their own."""
CASES = [(layer_class, name) for layer_class, names in PROMISED.items() for name in names.split()]


def attention_class(name: str) -> type[SynthesizerMixin]:
    return getattr(hf_synthesizer, f"Synthesizer{name}Attention")


def synthesized(model: nn.Module) -> list[SynthesizerMixin]:
    return [module for module in model.modules() if isinstance(module, SynthesizerMixin)]


@pytest.mark.parametrize(("layer_class", "name"), CASES)
def test_what_is_promised_has_a_forward_of_its_own(layer_class: str, name: str) -> None:
    cls = attention_class(name)
    assert find_layer_class(cls.stock_class).__name__ == layer_class and issubclass(cls, cls.stock_class)
    assert not issubclass(cls, StockForwardLayer) and cls.forward is not cls.stock_class.forward


@pytest.mark.parametrize("keeps_stock_forward", [False, True], ids=["layer_class", "StockForwardLayer"])
@pytest.mark.parametrize(("layer_class", "name"), CASES)
def test_a_forward_has_the_stock_parameters(layer_class: str, name: str, keeps_stock_forward: bool) -> None:
    """In name, kind and order; where the stock forward insists on one, ours may have None for it."""
    stock = attention_class(name).stock_class
    made = hf_synthesizer.layers.synthesizer_class(stock, keeps_stock_forward=keeps_stock_forward)
    pairs = zip(*(inspect.signature(cls.forward).parameters.values() for cls in (made, stock)), strict=True)
    for own, theirs in pairs:
        assert (own.name, own.kind) == (theirs.name, theirs.kind)
        assert own.default == theirs.default or (theirs.default is inspect.Parameter.empty and own.default is None)


@pytest.mark.parametrize("head", LAYER_CLASSES)
def test_the_model_of_each_layer_class_has_that_layer_class(head: str) -> None:
    layer_class = LAYER_CLASSES[head].layer_class
    for module in synthesized(patch_model(build(head), "random")):
        assert layer_class in [cls.__name__ for cls in type(module).__mro__]
        assert isinstance(module, StockForwardLayer) == (layer_class == "StockForwardLayer")
    assert {sample.layer_class for sample in LAYER_CLASSES.values()} == set(PROMISED) - {"BertLayer", "T5Layer"} | {
        "StockForwardLayer"
    }


@pytest.mark.parametrize("variant", ["random", "dense"])
@pytest.mark.parametrize(
    "head", [head for head, sample in LAYER_CLASSES.items() if sample.layer_class != "StockForwardLayer"]
)
def test_a_layer_that_compares_nothing_has_no_projections_to_compare_with(head: str, variant: str) -> None:
    stock = build(head)
    before = {type(module).__name__ for module in stock.modules()}
    model = patch_model(stock, variant)
    layers = synthesized(model)
    assert layers and "Guard" not in before
    for module in layers:
        projection_names = module.projection_names
        assert isinstance(module._modules[module.guard_name], Guard)
        assert not {projection_names.query, projection_names.key, projection_names.fused} & set(module._modules) - {
            module.guard_name
        }
        assert sum(p.numel() for p in module._modules[projection_names.value].parameters()) <= 24 * 24 + 24


@pytest.mark.parametrize(
    "head", [head for head, sample in LAYER_CLASSES.items() if sample.layer_class != "StockForwardLayer"]
)
def test_nothing_of_queries_and_keys_is_computed(head: str) -> None:
    """No norm and no projection of a patched layer runs but that of its values and its output."""
    model, ran = patch_model(build(head), "random"), []
    for layer in synthesized(model):
        kept = {layer.projection_names.value, layer.projection_names.output, "LayerNorm"}
        for name, module in layer.named_children():
            if name not in kept and list(module.parameters()) and not name.startswith("synthesizer"):
                module.register_forward_hook(lambda module, arguments, output, name=name: ran.append(name))
    with torch.no_grad():
        first_output(model(**batch(head)))
    assert not ran


DROP_INS = {
    "BertSelf": (dict(layer_idx=0), {"num_attention_heads": 3}),
    "T5": (dict(layer_idx=0), {"d_kv": 8, "num_heads": 3, "d_model": 24}),
    "Llama": (dict(layer_idx=0), {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "ViT": ({}, {"num_attention_heads": 3, "image_size": 16, "patch_size": 2}),
    "GPT2": (dict(layer_idx=0), {"n_embd": 24, "n_head": 3}),
    "ModernBert": (dict(layer_idx=0), {"num_attention_heads": 3}),
}


@pytest.mark.parametrize("variant", ["random", "factorized_dense", "random+dot_product"])
@pytest.mark.parametrize("name", DROP_INS)
def test_a_drop_in_class_stands_where_the_stock_class_stood(name: str, variant: str) -> None:
    arguments, sizes = DROP_INS[name]
    cls = attention_class(name)
    config_name = cls.stock_class.__module__.rpartition("modeling_")[2]
    sizes = {"max_position_embeddings": 24, **({"hidden_size": 24} if name not in ("T5", "GPT2") else {}), **sizes}
    config = AutoConfig.for_model(config_name, attn_implementation="sdpa", **sizes)
    layer = cls(config, **arguments, synthesizer=variant).eval()
    assert isinstance(layer, cls.stock_class) and isinstance(layer, cls)
    given = {}
    if name in ("Llama", "ModernBert"):
        width = 24 // sizes["num_attention_heads"]
        given["position_embeddings"] = (torch.ones(1, 5, width), torch.zeros(1, 5, width))
    with torch.no_grad():
        output = layer(torch.randn(2, 5, 24), **given)[0]
        stock = cls.stock_class(config, **arguments).eval()(torch.randn(2, 5, 24), **given)[0]
    assert output.shape == stock.shape


def test_the_front_door_names_the_drop_in_classes() -> None:
    from hf_synthesizer import SynthesizerBertSelfAttention, SynthesizerT5Attention
    from hf_synthesizer.models import SynthesizerLlamaAttention

    assert {"SynthesizerBertSelfAttention", "SynthesizerT5Attention"} <= set(hf_synthesizer.__all__)
    for cls in (SynthesizerBertSelfAttention, SynthesizerT5Attention, SynthesizerLlamaAttention):
        assert pickle.loads(pickle.dumps(cls)) is cls and getattr(models, cls.__name__) is cls


WINDOWED = {
    "MistralForCausalLM": {"sliding_window": 4},
    "Gemma2ForCausalLM": {"sliding_window": 4, "head_dim": 4, "query_pre_attn_scalar": 4},
    "Gemma3ForCausalLM": {
        "sliding_window": 4,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def windowed(head: str, **changes: object) -> PreTrainedModel:
    """A tiny decoder whose layers, or some of them, see four tokens at a time."""
    config_name = {"Gemma3ForCausalLM": "Gemma3TextConfig"}.get(head, head.replace("ForCausalLM", "Config"))
    settings = {**LAYER_CLASSES["LlamaForCausalLM"].settings, **WINDOWED[head], **changes}
    return getattr(transformers, head)(getattr(transformers, config_name)(**settings)).eval()


@pytest.mark.parametrize("head", WINDOWED)
def test_a_window_stays_a_window(head: str) -> None:
    """Under all-zero logits what is left is the mean of the values in the window, as of stock with queries of zero."""
    model, ids = windowed(head), torch.randint(2, 64, (2, 9))
    with torch.no_grad():
        kept = [layer.self_attn.q_proj.weight.clone() for layer in model.model.layers]
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
        expected = model(ids).logits
        for layer, weight in zip(model.model.layers, kept, strict=True):
            layer.self_attn.q_proj.weight.copy_(weight)
        patch_model(model, "random")
        for module in synthesized(model):
            module.synthesizer.table.zero_()
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["random", "factorized_dense+salience", "random+dot_product"])
@pytest.mark.parametrize("head", WINDOWED)
def test_windows_in_each_kind_of_cache(head: str, variant: str) -> None:
    model, ids = windowed(head), torch.randint(2, 64, (2, 6))
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    patch_model(model, variant, mixing="sum") if "+" in variant else patch_model(model, variant)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **settings)
    for cache in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, **cache, **settings), expected)
    if variant == "random+dot_product":
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, stock)


def in_a_new_process(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_imports_no_modeling_file_and_little_else() -> None:
    """All that users of torch and transformers do not have in memory yet are our own few modules."""
    found = in_a_new_process(
        "import sys, torch, transformers\n"
        "from transformers import AutoConfig\n"
        "before = set(sys.modules)\n"
        "import hf_synthesizer\n"
        "print(*sorted(set(sys.modules) - before))"
    ).split()
    assert not [name for name in found if ".modeling_" in name]
    ours = [name for name in found if name.startswith("hf_synthesizer")]
    assert len(ours) <= 8 and len(found) - len(ours) <= 5, found


BROKEN = """
import importlib.abc, sys

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.models.llama.modeling_llama":
            raise ImportError("this file is broken")

sys.meta_path.insert(0, Broken())
import hf_synthesizer
from hf_synthesizer import UnsupportedModelError, patch_model
from tests.helpers.models import batch, build, first_output

for head in ("BertForSequenceClassification", "T5ForConditionalGeneration", "GPT2LMHeadModel"):
    model = patch_model(build(head), "random")
    assert first_output(model(**batch(head))).isfinite().all()
assert isinstance(hf_synthesizer.SynthesizerMistralAttention, type)
try:
    hf_synthesizer.SynthesizerLlamaAttention
except AttributeError as error:
    print(error)
"""


def test_a_broken_file_of_one_model_type_leaves_the_others_working() -> None:
    assert re.search(
        "'SynthesizerLlamaAttention'.*Llama's could not be imported: this file is broken", in_a_new_process(BROKEN)
    )


LOADED = """
import pickle, sys, torch, transformers
from pathlib import Path
for folder in sorted(path for path in Path(sys.argv[1]).iterdir()):
    inputs, expected = torch.load(folder / "example.pt")
    auto = getattr(transformers, (folder / "auto").read_text())
    loaded = auto.from_pretrained(folder, trust_remote_code=True).eval()
    unpickled = pickle.loads((folder / "model.pickle").read_bytes())
    for model in (loaded, unpickled):
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, expected), folder
    assert type(loaded) is type(unpickled) and type(loaded).__module__ == "hf_synthesizer.models"
    print(folder.name)
"""


def test_a_process_that_imports_transformers_alone_loads_and_unpickles(tmp_path: Path) -> None:
    heads = ["GPT2LMHeadModel", "LlamaForCausalLM", "Phi3ForCausalLM", "ViTForImageClassification"]
    for head in heads:
        model, inputs = patch_model(build(head), "random+dot_product"), batch(head)
        folder = tmp_path / "models" / head
        model.save_pretrained(folder)
        with torch.no_grad():
            torch.save((inputs, model(**inputs).logits), folder / "example.pt")
        (folder / "auto").write_text(serving_auto_classes(model)[0])
        (folder / "model.pickle").write_bytes(pickle.dumps(model))
    home = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert in_a_new_process(LOADED, str(tmp_path / "models"), **home).split() == heads
