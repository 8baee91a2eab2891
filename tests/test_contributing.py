"""The checklists of CONTRIBUTING.md work: their examples are run, registered, patched in, trained and loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"

VARIANT_CHECK = """
from tests.models import batch, build, decoder
from hf_synthesizer import list_variants
assert "distance" in list_variants()
model = patch_model(build("BertForSequenceClassification"), "distance+salience")
model(**batch("BertForSequenceClassification")).logits.sum().backward()
grads = [parameter.grad for name, parameter in model.named_parameters() if "log_slope" in name]
assert len(grads) == 2 and all(grad.abs().max() > 0 for grad in grads)
model = patch_model(decoder("t5"), "distance")
ids, keep = torch.randint(2, 64, (2, 5)), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
settings = dict(do_sample=False, max_new_tokens=4, min_new_tokens=4)
together = model.generate(ids, attention_mask=keep, **settings)
assert torch.equal(together, model.generate(ids, attention_mask=keep, use_cache=False, **settings))
assert torch.equal(together[:1], model.generate(ids[:1, 2:], **settings))
"""

FAMILY_CHECK = """
import inspect, tempfile
from transformers import AutoModelForSequenceClassification, ElectraForSequenceClassification
from hf_synthesizer import list_families, patch_model, unpatch_model
assert "electra" in list_families()
ours, stock = SynthesizerElectraSelfAttention.forward, ElectraSelfAttention.forward
assert list(inspect.signature(ours).parameters) == list(inspect.signature(stock).parameters)
config = ElectraConfig(vocab_size=64, embedding_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                       intermediate_size=16, max_position_embeddings=12)
model, ids = ElectraForSequenceClassification(config).eval(), torch.randint(2, 64, (2, 7))
before = model(input_ids=ids).logits
patched = patch_model(model, "random+dense")(input_ids=ids).logits
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
assert torch.equal(loaded(input_ids=ids).logits, patched)
assert torch.equal(unpatch_model(model)(input_ids=ids).logits, before)
"""


def example(section: str) -> str:
    text = GUIDE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


@pytest.mark.parametrize(
    ("section", "check"), [("Adding a variant", VARIANT_CHECK), ("Adding a family", FAMILY_CHECK)]
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
