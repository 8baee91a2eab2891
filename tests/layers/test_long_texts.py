"""A text of 40,000 tokens: logits by distance and windows need memory in proportion to the length."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel
from hf_synthesizer import patch_model

length, options = 40_000, dict(eval(sys.argv[2]))
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
torch.manual_seed(0)
if sys.argv[1] == "bert":
    model = BertModel(BertConfig(**sizes, max_position_embeddings=length))
else:
    model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=length))
patch_model(model.eval(), **options)
ids = torch.randint(1, 50, (1, length))
with torch.no_grad():
    whole = model(ids).last_hidden_state
assert whole.shape == (1, length, 32) and whole.isfinite().all()
# Not resource.getrusage, whose peak is that of the parent if that one was larger when it started this process.
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak) // 1024)
"""
GIGABYTES = 2
PATCHES = [
    ("bert", "1", {"variant": "relative"}),
    ("bert", "0", {"variant": "relative", "window": 64}),
    ("llama", "1", {"variant": "dot_product", "window": 64}),
    ("llama", "0", {"variant": "relative+salience", "max_distance": 32}),
]
"""A model, whether it has the native kernels, and the patch."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("model", "native", "options"), PATCHES)
def test_a_text_of_40_000_tokens_needs_less_than_two_gigabytes(model: str, native: str, options: dict) -> None:
    environment = {**os.environ, "HF_SYNTHESIZER_NATIVE": native, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, model, repr(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < GIGABYTES * 1024
