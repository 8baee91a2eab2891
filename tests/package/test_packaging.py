"""The wheel, as a user gets it: built from the repository, installed into an empty environment, imported from there."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hf_synthesizer
from hf_synthesizer.checkpoints.auto import SHIM, write_shim
from hf_synthesizer.version import HOW_TO_INSTALL

ROOT = Path(__file__).resolve().parents[2]

# One worker builds the wheel, and it alone runs these tests.
pytestmark = pytest.mark.xdist_group("packaging")


def run(*command: object, cwd: Path) -> str:
    """Run a command away from the repository, without a network, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, so that no build folder is left in it, nor an old one read."""
    source = tmp_path_factory.mktemp("source") / "repository"
    source.mkdir()
    caches = shutil.ignore_patterns("__pycache__", ".*")
    for entry in ROOT.iterdir():
        if entry.name.startswith(".") or entry.name in ("build", "dist") or entry.suffix == ".egg-info":
            continue
        if not entry.is_dir():
            shutil.copy2(entry, source)
        elif (entry / "pyvenv.cfg").exists():
            continue
        elif entry.name in ("hf_synthesizer", "tests", "examples"):
            shutil.copytree(entry, source / entry.name, ignore=caches)
    dist = source.parent / "dist"
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, source, cwd=source)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path, contents: list[str]) -> Message:
    (name,) = (name for name in contents if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(contents: list[str]):
    tops = {name.split("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_synthesizer"}


def test_the_wheel_holds_every_file_of_the_package(contents: list[str]):
    package = ROOT / "hf_synthesizer"
    kept = [
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix in (".py", ".md", ".html", ".csv", ".typed")
    ]
    assert "hf_synthesizer/py.typed" in contents
    assert {path.relative_to(ROOT).as_posix() for path in kept} <= set(contents)


def test_the_wheel_brings_the_command(wheel: Path, contents: list[str]):
    (name,) = (name for name in contents if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "hf-synthesizer = hf_synthesizer.cli.app:main" in archive.read(name).decode()


def test_the_version_is_stated_once(metadata: Message):
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: hf_synthesizer.version.__version__"
    assert metadata["Version"] == hf_synthesizer.__version__
    stated = re.compile(
        rf"""^\W*(?:__)?(?:version|release)(?:__)?["']?\s*[:=]\s*["']?{re.escape(hf_synthesizer.__version__)}\b""",
        re.MULTILINE,
    )
    texts = [
        path for suffix in ("py", "cfg", "toml", "cff", "yml", "yaml", "md") for path in ROOT.rglob(f"*.{suffix}")
    ]
    own = [path for path in texts if not {".venv", "venv", "build"} & set(path.relative_to(ROOT).parts)]
    places = [path.relative_to(ROOT).as_posix() for path in own if stated.search(path.read_text(encoding="utf-8"))]
    assert places == ["hf_synthesizer/version.py"]


def test_nobody_is_sent_to_the_package_index():
    """The name there is not ours. `version.py` says where the package comes from, and nothing else does."""
    texts = [
        path for name in ("hf_synthesizer", "docs", "examples", "benchmarks") for path in (ROOT / name).rglob("*")
    ]
    texts = [
        path for path in (*texts, *ROOT.glob("*")) if path.suffix in (".py", ".md", ".cfg", ".toml", ".yaml", ".ipynb")
    ]
    by_name = re.compile(r"pip install [^`\n]*(?<![/\w])hf[_-]synthesizer")
    found = [path.relative_to(ROOT) for path in texts if by_name.search(path.read_text(encoding="utf-8"))]
    assert len(texts) > 100 and not found


def test_a_saved_shim_says_how_to_install_the_package(tmp_path: Path):
    write_shim(tmp_path)
    text = (tmp_path / SHIM.name).read_text(encoding="utf-8")
    assert f'HOW_TO_INSTALL = "{HOW_TO_INSTALL}"' in text and "{{" not in text
    compile(text, SHIM.name, "exec")


def test_a_release_writes_its_address_in_one_place():
    source = (ROOT / "hf_synthesizer" / "version.py").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    exec(source.replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/hf_synthesizer"'), names)
    assert names["HOW_TO_INSTALL"] == "`pip install git+https://example.org/hf_synthesizer`"


def test_the_citation_names_the_paper():
    assert "2005.00743" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_metadata_carries_licence_readme_and_extras(metadata: Message, contents: list[str]):
    assert "Apache-2.0" in (metadata["License-Expression"], metadata["License"])
    assert any(name.endswith("/LICENSE") for name in contents)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"docs", "examples", "export", "page", "peft", "plots", "test"} <= set(metadata.get_all("Provides-Extra"))


def test_the_wheel_imports_in_an_empty_environment(wheel: Path, tmp_path: Path):
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)

    # The dependencies are too large to install once more: a .pth file shows those of the running environment. Python
    # does not read the .pth files of a folder that it was shown this way, so an editable install stays out of sight.
    site_packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    shown = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    assert not any(Path(path).resolve() == ROOT for path in shown)
    (site_packages / "dependencies.pth").write_text("\n".join(shown) + "\n")

    program = "import hf_synthesizer; print(hf_synthesizer.__file__); print(hf_synthesizer.__version__)"
    location, version = run(python, "-I", "-c", program, cwd=tmp_path).splitlines()[-2:]
    assert Path(location).resolve().is_relative_to(home.resolve())
    assert version == hf_synthesizer.__version__
