"""The README says what is so: its code runs, its tables agree with the registry, its files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_synthesizer import list_families, list_variants
from hf_synthesizer.synthesizers import MixtureSynthesizer
from hf_synthesizer.synthesizers.registry import get_variant
from tests.models import build

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


def test_every_family_is_named() -> None:
    assert all(family.upper() in README for family in list_families())


def test_every_linked_file_exists() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("number", range(len(re.findall("```python", README))))
def test_the_code_runs(number: int, tmp_path: Path) -> None:
    """In a folder where "bert-base-uncased" is a tiny model, since no test reaches a hub."""
    build("BertForSequenceClassification", num_hidden_layers=3).save_pretrained(tmp_path / "bert-base-uncased")
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr


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
