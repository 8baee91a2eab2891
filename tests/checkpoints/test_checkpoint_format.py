"""The format of checkpoints stays what docs/checkpoints.md says: old ones load, to the logits they had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_synthesizer import list_variants
from hf_synthesizer.models.description import FORMAT_VERSION
from hf_synthesizer.models.registration import remote_class
from tests.checkpoints.make_reference_checkpoints import FOLDER, SPECS, logits
from tests.helpers.models import MIXTURES

REFERENCES = sorted(path.parent for path in FOLDER.glob("v*/*/config.json"))
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.mark.parametrize("folder", REFERENCES, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_reference_checkpoint_loads_to_the_logits_it_had(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = remote_class(config["architectures"][0]).from_pretrained(folder)
    expected = load_file(folder / "expected.safetensors")["logits"]
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    auto = next(name for name in config["auto_map"] if name.startswith("AutoModel"))
    assert type(getattr(transformers, auto).from_pretrained(folder)) is type(model)


@pytest.mark.parametrize("variant", [*list_variants(), *MIXTURES])
def test_every_variant_has_a_reference_checkpoint(variant: str) -> None:
    folder = FOLDER / f"v{FORMAT_VERSION}" / f"bert-{variant}"
    assert folder in REFERENCES, (
        "run `python -m tests.checkpoints.make_reference_checkpoints` and commit what it writes"
    )


def test_references_are_small_and_none_is_left_over() -> None:
    assert {folder.name for folder in REFERENCES if folder.parent.name == f"v{FORMAT_VERSION}"} == set(SPECS)
    for folder in REFERENCES:
        assert sum(path.stat().st_size for path in folder.iterdir()) < 24_000


def test_the_page_names_what_a_checkpoint_holds() -> None:
    page = PAGE.read_text(encoding="utf-8")
    stored = json.loads((FOLDER / f"v{FORMAT_VERSION}" / "t5-hybrid" / "config.json").read_text())["synthesizer"]
    for key in (*stored, *(key for config in stored["configs"] for key in config)):
        assert f"`{key}`" in page, key
    assert f"format_version` {FORMAT_VERSION}" in page
