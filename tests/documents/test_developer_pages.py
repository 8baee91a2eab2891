"""The pages for developers: the files that they name are there, decisions are short, and the log of routes looks as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_synthesizer"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DECISIONS = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
PARTS = ("Problem", "Decision", "Consequence")
WORDS = 120
OUTSIDE = [ROOT / name for name in ("tests", "benchmarks", "examples", "docs")]
"""Folders beside the package, which the page maps too."""

SLOW_CALL = """
import torch
from hf_synthesizer.attend import attend
from hf_synthesizer.logits.forms import Explicit
attend(Explicit(torch.zeros(2, 4, 1, 8)), torch.zeros(2, 4, 8, 16))
"""


@pytest.mark.parametrize("page", [ARCHITECTURE, DECISIONS], ids=["architecture", "decisions"])
def test_files_and_rooms_that_a_page_names_are_there(page: str) -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", page))
    assert len(named) > 10
    missing = {path for path in named if not any((root / path).exists() for root in (ROOT, PACKAGE))}
    assert not missing


def test_functions_of_the_walk_are_in_their_files() -> None:
    """`layers/signatures/bert.py` · `BertLayer.forward`: each name after a file is in that file."""
    walk = re.findall(r"`(\w[\w/]*\.py)` · `([\w.]+)`", ARCHITECTURE)
    assert len(walk) > 10
    for path, name in walk:
        code = (PACKAGE / path).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", code), f"{name} in {path}"


def test_every_room_is_on_the_page() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE, re.MULTILINE)) - {path.name for path in OUTSIDE}


def test_the_arrows_are_those_that_lint_holds() -> None:
    drawn = ARCHITECTURE.split("## Rooms and arrows")[1].split("```")[1].split("▼")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [line.strip() for line in drawn] == settings["tool"]["importlinter"]["contracts"][0]["layers"]


def test_a_decision_has_three_parts_and_is_short() -> None:
    decisions = re.split(r"^### ", DECISIONS, flags=re.MULTILINE)[1:]
    assert len(decisions) > 20
    for decision in decisions:
        title, _, text = re.split(r"^## ", decision, flags=re.MULTILINE)[0].partition("\n")
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == list(PARTS), title
        assert len(text.split()) <= WORDS, f"{title}: {len(text.split())} words"


def test_the_log_of_routes_looks_as_it_is_shown() -> None:
    code = re.findall(r"```py\n(.*?)```", ARCHITECTURE, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code + SLOW_CALL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "DEBUG:hf_synthesizer.attend:Explicit logits for values (2, 4, 8, 16): route reference" in done.stderr
