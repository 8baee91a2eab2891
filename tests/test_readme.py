"""The README says what is so: its code runs, its tables agree with the registry, its files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_synthesizer import list_variants
from hf_synthesizer.synthesizers import MixtureSynthesizer
from hf_synthesizer.synthesizers.registry import get_variant
from tests.glue_rows import write_tasks
from tests.hub_server import HubServer, hub  # noqa: F401
from tests.models import build
from tests.tokenizers import save_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_variants_is_the_registry() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", README.split("## The variants")[1].split("\n## ")[0], re.MULTILINE)
    )
    assert set(rows) == set(list_variants())
    for name, row in rows.items():
        cls = get_variant(name)
        formula = cls.formula + (", not trained" if name == "fixed_random" else "")
        assert row == f"{formula} | {cls.parameter_formula}"
    assert f"| {MixtureSynthesizer.formula} | {MixtureSynthesizer.parameter_formula} |" in README


def test_every_linked_file_exists() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.xdist_group("hub")
@pytest.mark.parametrize("number", range(len(re.findall("```python", README))))
def test_the_code_runs(number: int, tmp_path: Path, hub: HubServer) -> None:  # noqa: F811
    """In a folder where the models are tiny, and "nyu-mll/glue" is tiny data, beside a Hub to push to."""
    build("BertForSequenceClassification", num_hidden_layers=3).save_pretrained(tmp_path / "bert-base-uncased")
    save_tokenizer(tmp_path / "bert-base-uncased")
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    build("LlamaForCausalLM", **small).save_pretrained(tmp_path / "HuggingFaceTB" / "SmolLM2-135M")
    build("ViTForImageClassification").save_pretrained(tmp_path / "google" / "vit-base-patch16-224")
    data = tmp_path / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    write_tasks(data)
    (data / "README.md").write_text("---\nconfigs:\n- config_name: sst2\n  data_dir: sst2\n---\n")
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number].replace("steps=900", "steps=9")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    if "push_to_hub" in code:
        assert "accuracy" in result.stdout and "'label': 'LABEL_" in result.stdout
        assert "model.safetensors" in hub.repos["me/bert-synthesizer-sst2"].files()


def test_the_example_of_the_attention_layer_runs() -> None:
    import doctest

    import hf_synthesizer.attention

    assert doctest.testmod(hf_synthesizer.attention).failed == 0


def test_compare_variants_prints_every_variant() -> None:
    command = [sys.executable, str(ROOT / "examples" / "compare_variants.py")]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert all(f"\n{variant} " in result.stdout for variant in list_variants())
    assert "(1, 32, 1024)" in result.stdout and "(1, 16, 32, 32)" in result.stdout
