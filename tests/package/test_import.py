"""To import the package costs next to nothing, and makes Transformers know the patched model types all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import hf_synthesizer
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
from transformers import AutoConfig
config = AutoConfig.for_model("synthesizer_bert", num_hidden_layers=1)
assert type(config).__name__ == "SynthesizerBertConfig", config
import inspect
mapping = sys.modules["transformers.models.auto.configuration_auto"]
assert "CONFIG_MAPPING" in inspect.getsource(mapping)
assert type(mapping.__spec__.loader) is type(sys.modules["transformers.models.auto"].__spec__.loader)
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_synthesizer")]
"""


def test_model_types_are_served_when_transformers_is_imported_later() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
