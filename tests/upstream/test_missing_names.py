"""A release of another library may remove a private name: each is taken away in turn, and the package works or says why not.

The names are taken away in processes of their own (tests/helpers/missing_names.py), before the package is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_synthesizer import upstream

pytestmark = pytest.mark.xdist_group("missing_names")  # one worker takes the names away, once

CLASSES_OF_AUTO_CLASSES = "transformers.models.auto.auto_factory#_model_mapping"
WARNED = (
    CLASSES_OF_AUTO_CLASSES,
    "transformers.models.auto.configuration_auto#_extra_content",
    "transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
    "transformers.PreTrainedModel._upload_modified_files",
)
REFUSED = {
    "torch._assert_async": "try_assertion",
    "transformers.core_model_loading#_weight_conversions": "try_conversions",
}
"""What raises the error of the register: besides these, all of what is required."""


@pytest.fixture(scope="module")
def results() -> dict[str | None, dict[str, Any]]:
    """What happened without each name; None is the key of the run that has all of them."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.helpers.missing_names"]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert completed.returncode == 0, completed.stderr
    return dict(json.loads(line) for line in completed.stdout.splitlines() if line.startswith("["))


def sentence(path: str) -> str:
    return upstream.explain_missing(path)


def test_each_name_is_taken_away(results: dict[str | None, dict[str, Any]]) -> None:
    assert results.keys() == {None, *upstream.REGISTER}


@pytest.mark.parametrize("path", [None, *upstream.REGISTER])
def test_without_a_name_the_package_imports_and_stock_models_are_untouched(
    path: str | None, results: dict[str | None, dict[str, Any]]
) -> None:
    assert results[path].get("stock is untouched") is True, results[path]


@pytest.mark.parametrize("path", [path for path, entry in upstream.REGISTER.items() if not entry.required])
def test_without_a_name_a_patched_model_gives_the_same_numbers(
    path: str, results: dict[str | None, dict[str, Any]]
) -> None:
    expected, result = results[None]["try_patched"], results[path]["try_patched"]
    assert isinstance(result, dict), result
    assert result["numbers"] == pytest.approx(expected["numbers"], rel=1e-4, abs=1e-5)
    assert result["attentions"] == expected["attentions"] == 1 or path in WARNED
    assert (result["auto class"] == expected["auto class"]) == (path != CLASSES_OF_AUTO_CLASSES)


@pytest.mark.parametrize("path", [path for path, entry in upstream.REGISTER.items() if entry.required])
def test_without_a_required_name_one_error_says_so(path: str, results: dict[str | None, dict[str, Any]]) -> None:
    error = results[path]["try_patched"]
    assert error.startswith(f"UnsupportedModelError: {sentence(path)}. Install an older transformers")


@pytest.mark.parametrize("path", REFUSED)
def test_what_has_no_stand_in_is_refused(path: str, results: dict[str | None, dict[str, Any]]) -> None:
    assert results[path][REFUSED[path]].startswith(f"UnsupportedModelError: {sentence(path)}")


@pytest.mark.parametrize("path", upstream.REGISTER)
def test_one_warning_says_what_is_lost(path: str, results: dict[str | None, dict[str, Any]]) -> None:
    warnings = results[path]["warnings"]
    if path.startswith("libtorch_cpu.so"):
        (line,) = warnings
        assert "runs without its native kernels" in line
    else:
        assert warnings == ([f"{sentence(path)}."] if path in WARNED else [])


def test_an_offloaded_model_is_refused_without_the_name_of_its_hook(results: dict[str | None, dict[str, Any]]) -> None:
    assert results["accelerate.hooks#_hf_hook"]["try_offloaded"].startswith("UnsupportedModelError: ")
    assert "offloaded" in results["accelerate.hooks#_hf_hook"]["try_offloaded"]


def test_transforms_of_torch_func_fail_with_an_error(results: dict[str | None, dict[str, Any]]) -> None:
    assert "Error: " in results["torch._C._are_functorch_transforms_active"]["try_transform"]


@pytest.mark.parametrize("path", upstream.REGISTER)
def test_a_sentence_names_library_and_name(path: str) -> None:
    text = sentence(path)
    name = path.rpartition("#" if "#" in path else ":" if ":" in path else ".")[2]
    assert name in text and text.split()[0] in ("torch", "transformers", "accelerate") and "\n" not in text
