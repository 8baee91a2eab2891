"""What a public repository brings along: workflows, templates, a policy, each of them fit for use."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from benchmarks.report import covered_lines

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def test_workflows_run_what_a_contributor_runs() -> None:
    """Every step that calls make calls a target that is there, on each Python that the package names."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called: set[str] = set()
    pythons: list[str] = []
    for path in (GITHUB / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"]
        for job in workflow["jobs"].values():
            pythons += job.get("strategy", {}).get("matrix", {}).get("python", [])
            for step in job["steps"]:
                run = step.get("run", "")
                called |= set(run.split()[1:]) if run.startswith("make ") else set()
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = re.findall(r":: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    assert called <= targets and {"lint", "types", "test", "docs", "wheel", "sdist"} <= called
    assert sorted(pythons) == sorted(named)


@pytest.mark.parametrize("name", ["bug", "model"])
def test_issue_forms_ask_for_what_is_needed(name: str) -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_the_tests_run_most_of_the_package() -> None:
    files = {"__init__.py": (4, 4), "attend/sdpa.py": (10, 8), "attend/triton/tiles.py": (6, 3)}
    report = {
        f"hf_synthesizer/{name}": {"summary": {"num_statements": statements, "covered_lines": covered}}
        for name, (statements, covered) in files.items()
    }
    counted = covered_lines.rooms({"files": report})
    assert counted == {".": (4, 4), "all": (20, 15), "attend": (10, 8), "attend/triton": (6, 3)}
    rows = covered_lines.table()[1] if covered_lines.FILE.exists() else []
    assert all(float(share) >= 95 for room, _, share in rows if room == covered_lines.TOTAL)
