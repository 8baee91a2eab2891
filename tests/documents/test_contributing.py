"""The checklists of CONTRIBUTING.md work: their examples are run, registered, patched in, trained and loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"

VARIANT_CHECK = """
import copy, json, sys, tempfile
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner
from tests.helpers.models import batch, build, decoder
from tests.helpers.teaching import loader, sharp
from hf_synthesizer import InvalidConfigError, list_variants, transfer_attention
from hf_synthesizer.cli.app import app
assert "distance" in list_variants()
model = patch_model(build("BertForSequenceClassification"), "distance+salience")
model(**batch("BertForSequenceClassification")).logits.sum().backward()
grads = [parameter.grad for name, parameter in model.named_parameters() if "log_slope" in name]
assert len(grads) == 2 and all(grad.abs().max() > 0 for grad in grads)
steep = patch_model(build("BertForSequenceClassification"), "distance", slope=0.1)
slopes = [tensor for name, tensor in steep.state_dict().items() if "log_slope" in name]
assert len(slopes) == 2 and all(torch.allclose(slope.exp(), torch.tensor(0.1)) for slope in slopes)
try:
    patch_model(build("BertForSequenceClassification"), "distance", slope="steep")
except InvalidConfigError as error:
    assert "slope must be a number, not 'steep'" in str(error)
else:
    raise AssertionError("a slope that is no number")
teacher, batches = sharp("BertForSequenceClassification"), loader("BertForSequenceClassification")
taught = patch_model(copy.deepcopy(teacher), "distance", slope=2.0)
report = transfer_attention(taught, teacher, batches, method="average", progress=False)
assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)
with tempfile.TemporaryDirectory() as folder:
    taught.save_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert loaded.config.synthesizer["configs"] == [{"variant": "distance", "max_length": 24, "slope": 2.0}]
    assert torch.equal(loaded(**batches[0]).logits, taught(**batches[0]).logits)
    steep.load_state_dict(loaded.state_dict())  # the slope is no part of the fingerprint
    build("BertForSequenceClassification").save_pretrained(folder + "/stock")
    command = ["patch", folder + "/stock", "--variant", "distance", "--option", "slope=0.5", "--output", folder + "/patched"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.load(open(folder + "/patched/config.json"))["synthesizer"]["configs"][0]["slope"] == 0.5
listing = CliRunner().invoke(app, ["variants", "distance"]).output
assert "one slope" in listing and "slope = 0.05: how fast" in listing
model = patch_model(decoder("t5"), "distance")
ids, keep = torch.randint(2, 64, (2, 5)), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
settings = dict(do_sample=False, max_new_tokens=4, min_new_tokens=4)
together = model.generate(ids, attention_mask=keep, **settings)
assert torch.equal(together, model.generate(ids, attention_mask=keep, use_cache=False, **settings))
assert torch.equal(together[:1], model.generate(ids[:1, 2:], **settings))
"""

LAYER_CHECK = """
import inspect, tempfile
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM
from hf_synthesizer import list_model_types, models, patch_model, unpatch_model
from tests.helpers.models import randomize
assert "gpt_neo" in list_model_types()
ours, stock = models.SynthesizerGPTNeoSelfAttention.forward, GPTNeoSelfAttention.forward
assert list(inspect.signature(ours).parameters) == list(inspect.signature(stock).parameters)
config = GPTNeoConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=16, window_size=3,
                      attention_types=[[["global", "local"], 1]], max_position_embeddings=24, initializer_range=0.3)
model, ids = GPTNeoForCausalLM(config).eval(), torch.randint(2, 64, (2, 7))
settings = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
with torch.no_grad():
    before = model(ids).logits
    for variant, options in (("dot_product", {}), ("random+dot_product", {"mixing": "sum"})):
        torch.testing.assert_close(patch_model(model, variant, **options)(ids).logits, before, rtol=1e-4, atol=1e-4)
        unpatch_model(model)
    for variant in ("random", "dense+salience"):
        patch_model(model, variant)
        for name, module in model.named_modules():
            if name.endswith("synthesizer"):
                randomize(module)
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
        keep = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
        together = model.generate(ids, attention_mask=keep, **settings)
        assert torch.equal(together[0, -8:], model.generate(ids[:1, 2:], **settings)[0, -8:])
        patched = model(ids).logits
        cache = model(ids, use_cache=True).past_key_values
        assert cache.layers[0].keys.shape[-1] == 1
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, patched)
        assert torch.equal(unpatch_model(model)(ids).logits, before)
"""

TYPE_CHECK = """
import tempfile, torch
from hf_synthesizer import list_model_types, patch_model, unpatch_model
assert "owl" in list_model_types()
config = OwlConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                   intermediate_size=16, max_position_embeddings=12)
model, ids = OwlForCausalLM(config).eval(), torch.randint(2, 64, (2, 7))
with torch.no_grad():
    before = model(ids).logits
    patched = patch_model(model, "random+dot_product", mixing="sum")(ids).logits
    torch.testing.assert_close(patched, before, rtol=1e-4, atol=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(loaded) is type(model) and type(loaded).__name__ == "SynthesizerOwlForCausalLM"
        assert torch.equal(loaded(ids).logits, patched)
    assert torch.equal(unpatch_model(model)(ids).logits, before)
"""


def example(section: str) -> str:
    text = GUIDE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


def test_a_layer_class_is_fifty_lines_and_a_model_type_is_one() -> None:
    layer_class, model_type = example("Adding a layer class"), example("Adding a model type")
    assert len(layer_class.splitlines()) <= 50
    assert len(re.findall(r"^register_model_type\(.*\)", model_type, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("section", "check"),
    [("Adding a variant", VARIANT_CHECK), ("Adding a layer class", LAYER_CHECK), ("Adding a model type", TYPE_CHECK)],
)
def test_the_checklist_works(section: str, check: str, tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(f"import torch\ntorch.manual_seed(0)\n{example(section)}\n{check}", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(GUIDE.parent)},
    )
    assert result.returncode == 0, result.stderr
