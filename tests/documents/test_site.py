"""The documentation site: it is built without a warning or a network, and says what is so."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_synthesizer
from docs import draw_variants
from hf_synthesizer import list_variants
from hf_synthesizer.synthesizers import MixtureSynthesizer
from hf_synthesizer.synthesizers.registry import get_variant, variant_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
VARIANTS = (DOCS / "variants.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors, by a process that reaches nothing through any proxy."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "read"), str(DOCS)]
    environment = {**os.environ, **nowhere, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(folder / "html")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.xdist_group("site")
def test_every_document_is_a_page(site: Path) -> None:
    assert {page.stem for page in site.glob("*.html")} >= {document.stem for document in DOCS.glob("*.md")}


@pytest.mark.xdist_group("site")
def test_pages_load_nothing_from_a_network(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?:https?:)?//|<link\b[^>]*href=["']https?://"""
    )
    for page in site.glob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page.name
    for style in site.glob("_static/**/*.css"):
        assert not re.search(r"url\(.?https?:|@import", style.read_text(encoding="utf-8")), style.name


@pytest.mark.xdist_group("site")
def test_equations_are_drawn_by_the_browser(site: Path) -> None:
    page = (site / "variants.html").read_text(encoding="utf-8")
    assert page.count("<math") > 8 and "MathJax" not in page


@pytest.mark.xdist_group("site")
def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    names = set(hf_synthesizer.__all__) - {"__version__"}
    assert not {name for name in names if f".{name}" not in page}


def test_the_table_of_variants_is_the_registry() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]* \| [^|]*) \|$", VARIANTS, re.MULTILINE))
    assert set(rows) == set(list_variants())
    for name, row in rows.items():
        cls = get_variant(name)
        formula = cls.formula + (", not trained" if name == "fixed_random" else "")
        assert row == f"{formula} | {cls.parameter_formula}"
    assert f"| {MixtureSynthesizer.formula} | {MixtureSynthesizer.parameter_formula} |" in VARIANTS


def test_paragraphs_and_options_of_variants_are_those_of_their_classes() -> None:
    text = " ".join(VARIANTS.split())
    paragraphs = {name: get_variant(name).documentation() for name in list_variants()}
    assert not [name for name, paragraph in paragraphs.items() if not paragraph or paragraph not in text]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", VARIANTS, re.MULTILINE)
    names_of: dict[tuple[str, str, str], list[str]] = {}
    keeping = [variant for variant in list_variants() if not get_variant(variant).chooses_keys]
    for variant in list_variants():
        for name, option in variant_options(variant).items():
            default = "" if option.default is None else f"`{option.default!r}`"
            names_of.setdefault((name, default or "–", option.help), []).append(variant)
    declared = {
        (
            name,
            "all variants that keep all keys" if names == keeping else ", ".join(f"`{each}`" for each in names),
            *rest,
        )
        for (name, *rest), names in names_of.items()
    }
    assert set(rows) == declared and len(rows) == len(declared)


def test_each_message_of_troubleshooting_is_raised() -> None:
    """What the headings quote is in the code, "…" standing for what a message fills in."""
    raised = [" ".join(message.split()) for message in messages()]
    headings = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 30
    for heading in headings:
        within = heading.strip(
            "…. "
        )  # a class's name before a reason, and the end of its sentence, are added elsewhere
        quoted = re.compile(".*?".join(map(re.escape, within.split("…"))))
        assert any(quoted.search(message) for message in raised), heading


def messages() -> list[str]:
    """What the library's errors say, with "…" for each value."""
    found = []
    for path in (ROOT / "hf_synthesizer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_pictures_of_the_variants_are_drawn(tmp_path: Path, model_dir: Path) -> None:
    drawn = draw_variants.draw(str(model_dir), ["a good film", "a bad film"] * 8, tmp_path, steps=2)
    assert {path.name for path in drawn} == {path.name for path in (DOCS / "pictures").glob("variant-*")}
    assert all(f"pictures/{path.name}" in VARIANTS for path in drawn)
