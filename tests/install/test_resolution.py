"""Whether everything can be installed at its tested version, for each Python found here and both builds of PyTorch: `make test-install`.

Nothing is installed, and of packages whose index has their metadata apart (PyPI does) only that is fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.install

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
FOR_GPUS = ("nvidia-", "cuda-", "triton")
"""What PyTorch's ordinary build for Linux asks for beyond the one for processors."""
SECONDS = 1200


def interpreters() -> dict[str, str]:
    """The Pythons of `PYTHONS` that are found: this one, those on the path, and those of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = {}
    for version in PYTHONS:
        named = [shutil.which(f"python{version}"), *map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))]
        if version == ".".join(map(str, sys.version_info[:2])):
            named.insert(0, sys.executable)
        working = next((each for each in named if each and is_python(each, version)), None)
        if working:
            found[version] = working
    return found


def is_python(program: str, version: str) -> bool:
    print_versions = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([program, "-c", print_versions], capture_output=True, text=True)
    return done.stdout.strip() == version


def requirements() -> list[str]:
    """Of the package and of all its extras."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return sorted({line.strip() for lines in lists for line in lines.splitlines() if line.strip()})


def constraint(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (found,) = [line.split("==")[1] for line in lines if line.startswith(f"{name}==")]
    return found


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pip that resolves by metadata alone; that of an older Python would fetch gigabytes of wheels."""
    folder = tmp_path_factory.mktemp("pip")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "pip>=24.1"]
    subprocess.run(command, check=True, timeout=SECONDS)
    return folder


@pytest.fixture(scope="module")
def for_processors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The build for processors alone, as the resolver sees it: its own index need not be within reach."""
    folder, name = tmp_path_factory.mktemp("wheels"), f"torch-{constraint('torch')}+cpu"
    needed = [each for each in requires("torch") or [] if not each.startswith(FOR_GPUS) and "extra ==" not in each]
    metadata = ["Metadata-Version: 2.1", "Name: torch", f"Version: {constraint('torch')}+cpu"]
    metadata += [f"Requires-Dist: {each}" for each in needed]
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    yield folder


def resolved(interpreter: str, pip: Path, report: Path, *more: str) -> dict[str, dict]:
    """What pip would install into an empty environment, by name."""
    command = [
        interpreter,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
    ]
    command += ["-c", str(ROOT / "constraints.txt"), *requirements(), *more]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(pip)}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["metadata"]["name"].lower(): each["metadata"] for each in json.loads(report.read_text())["install"]}


@pytest.mark.parametrize(("version", "interpreter"), interpreters().items(), ids=interpreters())
def test_everything_installs_beside_the_ordinary_build(
    version: str, interpreter: str, pip: Path, tmp_path: Path
) -> None:
    # `===` is that very version: a build for processors alone that is at hand counts as a later one.
    found = resolved(interpreter, pip, tmp_path / "report.json", f"torch==={constraint('torch')}")
    assert found["torch"]["version"] == constraint("torch")
    if sys.platform == "linux":
        (wanted,) = [each for each in map(Requirement, found["torch"]["requires_dist"]) if each.name == "triton"]
        assert str(wanted.specifier) == f"=={constraint('triton')}", (
            "the Triton of the tests is the one that torch brings"
        )
    assert found["triton"]["version"] == constraint("triton")


@pytest.mark.parametrize(("version", "interpreter"), interpreters().items(), ids=interpreters())
def test_everything_installs_beside_the_build_for_processors(
    version: str, interpreter: str, pip: Path, for_processors: Path, tmp_path: Path
) -> None:
    exact = f"torch==={constraint('torch')}+cpu"
    found = resolved(interpreter, pip, tmp_path / "report.json", "--find-links", str(for_processors), exact)
    assert found["torch"]["version"] == constraint("torch") + "+cpu"
    assert found["triton"]["version"] == constraint("triton")
    assert not [name for name in found if name.startswith("nvidia-")]


def test_this_python_is_among_those_that_are_looked_at() -> None:
    assert ".".join(map(str, sys.version_info[:2])) in interpreters()
