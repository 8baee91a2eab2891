"""The documents say what is so: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import compare_variants
import pytest
import typer

import hf_synthesizer
from hf_synthesizer import list_variants
from hf_synthesizer.cli.app import app
from tests.helpers.documents import DOCUMENTS, ROOT, program_of, python_of, write_world
from tests.helpers.hub_server import HubServer, hub  # noqa: F401

WITH_CODE = [
    name for name in DOCUMENTS if name != "CONTRIBUTING.md" and python_of(name)
]  # whose examples test_contributing runs
PUSHING = ("docs/quickstart.md", "docs/checkpoints.md", "docs/training.md")
"""What pushes to the Hub, whose address a process reads once, or starts a group of processes."""
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


@pytest.mark.parametrize("name", [name for name in WITH_CODE if name not in PUSHING])
def test_the_code_of_a_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder where the models are tiny, and "nyu-mll/glue" is tiny data."""
    write_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    document = ModuleType("document")
    exec(compile(program_of(name, tmp_path), name, "exec"), document.__dict__)


@pytest.mark.parametrize("name", PUSHING)
def test_the_code_of_a_document_pushes(name: str, tmp_path: Path, hub: HubServer) -> None:  # noqa: F811
    """The same in a process of its own, beside a Hub to push to."""
    write_world(tmp_path)
    environment = {**hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program_of(name, tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    if name == "docs/quickstart.md":
        assert "accuracy" in done.stdout and "'label': 'LABEL_" in done.stdout
        assert "model.safetensors" in hub.repos["me/bert-synthesizer-sst2"].files()


def modules() -> list[ModuleType]:
    """The modules of the package that show examples in their docstrings."""
    named = pkgutil.walk_packages(hf_synthesizer.__path__, "hf_synthesizer.")
    found = [ROOT / (info.name.replace(".", "/") + ".py") for info in named]
    with_examples = [path for path in found if path.exists() and ">>> " in path.read_text(encoding="utf-8")]
    return [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in with_examples]


def test_the_examples_of_docstrings_run() -> None:
    tried = [doctest.testmod(module) for module in modules()]
    assert sum(result.attempted for result in tried) > 0
    assert sum(result.failed for result in tried) == 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    """To files and headings that are there; addresses on the web are looked at for their form alone."""
    text = re.sub(r"```.*?```", "", DOCUMENTS[name].read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            assert re.fullmatch(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[^\s<>\"]*)?", link), link
            continue
        path, _, heading = link.partition("#")
        target = (DOCUMENTS[name].parent / path).resolve() if path else DOCUMENTS[name]
        assert target.exists(), f"{link} in {name}"
        if heading:
            assert heading in anchors(target), f"{link} in {name}"


def anchors(path: Path) -> set[str]:
    """What a link to a heading says after the #, and the places that a page names itself."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    said = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return said | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def commands() -> list[tuple[str, list[str]]]:
    """Each line that a document shows for a shell, without what follows a #."""
    blocks = [(name, block) for name, path in DOCUMENTS.items() for block in bash_of(path.read_text(encoding="utf-8"))]
    return [
        (name, words)
        for name, block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]


def bash_of(text: str) -> list[str]:
    return re.findall(r"^[ ]*```bash\n(.*?)```", text, re.MULTILINE | re.DOTALL)


def test_commands_of_documents_exist() -> None:
    """Commands of ours with the options that they know, targets of the Makefile, scripts and modules that are there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    ours = typer.main.get_command(app)
    shown = commands()
    assert len(shown) > 20
    for name, words in shown:
        while "=" in words[0]:
            words = words[1:]  # what the environment gets
        if words[0] == "make":
            assert words[1] in targets, f"{words} in {name}"
        elif words[0] == "hf-synthesizer":
            command, rest = ours, words[1:]
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert command is not ours and asked <= known, f"{words} in {name}"
        for word in words:
            if word.endswith(".py") and "/" in word:
                assert (ROOT / word).exists(), f"{words} in {name}"
        for option, module in zip(words, words[1:], strict=False):
            if option == "-m" and module.startswith(("benchmarks.", "docs.")):
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"{words} in {name}"


def test_compare_variants_prints_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    compare_variants.main([])
    printed = capsys.readouterr().out
    assert all(f"\n{variant} " in printed for variant in list_variants())
    assert "(1, 32, 1024)" in printed and "(1, 16, 32, 32)" in printed
