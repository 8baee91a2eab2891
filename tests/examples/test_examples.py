"""Examples are scripts to copy: short, with what is ours in plain sight, and no name for two things."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")
TRAINING = [path for path in SCRIPTS if path.name.startswith("run_")]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def names_of(path: Path, kind: type) -> list[str]:
    return [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kind)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_has_at_most_250_lines(path: Path) -> None:
    assert lines(path) <= 250


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_what_is_ours_stands_in_the_main_of_a_script(path: Path) -> None:
    """Nobody has to look for the patch, the transfer and the saving in another file."""
    assert len(TRAINING) == 7
    (main,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    called = [
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(main)
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    ]
    saving = "save_pretrained" if path.stem == "run_glue_no_trainer" else "save_model"
    assert called.count("patch_model") == called.count("transfer_attention") == 1 and saving in called


def test_what_the_command_line_needs_is_one_small_room() -> None:
    assert sum(map(lines, (ROOT / "hf_synthesizer" / "glue").glob("*.py"))) <= 400
    assert not (ROOT / "hf_synthesizer" / "tasks").exists()


def test_the_package_knows_nothing_of_the_examples() -> None:
    for path in (ROOT / "hf_synthesizer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            asked += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not {"examples", "shared"} & {name.partition(".")[0] for name in asked}, path


def test_flags_of_two_kinds_have_two_names() -> None:
    files = [*SCRIPTS, *(ROOT / "examples" / "shared").glob("*.py")]
    classes = list(itertools.chain.from_iterable(names_of(path, ast.ClassDef) for path in files))
    assert len(classes) > 15 and len(classes) == len(set(classes))
