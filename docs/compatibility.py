"""Writes the matrix of docs/compatibility.md, and the tests behind it, from the markers `feature` in the tests.

    python -m docs.compatibility          # writes both pages
    python -m docs.compatibility --check  # only says whether they are what the markers say

A cell is what tests claim, and a test that claims what it does not do fails (tests/helpers/features.py). The tests are collected, not run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MATRIX, TESTS = ROOT / "docs" / "compatibility.md", ROOT / "docs" / "compatibility_tests.md"
PLACE = re.compile(
    r"(<!-- table: compatibility \(docs/compatibility\.py\) -->\n).*?(<!-- end of table -->)", re.DOTALL
)

Test = tuple[str, str]
"""File, from `tests/`, and function."""
Claims = dict[tuple[str, str], dict[bool, list[Test]]]
"""By feature and kind: the tests that say it works (False), and that it is refused (True)."""


class Collector:
    """A plugin of pytest that keeps what the collected tests claim."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_collection_finish(self, session) -> None:
        from tests.helpers.features import claims

        found = {
            (
                name,
                kind,
                marker.kwargs.get("refused", False),
                Path(item.path).relative_to(ROOT / "tests").as_posix(),
                item.originalname,
            )
            for item in session.items
            for name, kinds, marker in claims(item)
            for kind in kinds
        }
        self.path.write_text(json.dumps(sorted(found)), encoding="utf-8")


def collect(path: Path) -> None:
    """Write the claims of all tests, the slow ones too, to a file."""
    import pytest

    marked = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.feature(" in file.read_text("utf-8")]
    options = ["--collect-only", "-q", "-m", "feature", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    sys.exit(pytest.main([*options, *marked], plugins=[Collector(path)]))


def read_claims(path: Path) -> Claims:
    """What `collect` found, in a process of its own: pytest leaves much behind."""
    command = [sys.executable, "-m", "docs.compatibility", "--collect", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    claims: Claims = defaultdict(lambda: defaultdict(list))
    for name, kind, refused, file, function in json.loads(path.read_text(encoding="utf-8")):
        claims[name, kind][refused].append((file, function))
    return claims


def matrix(claims: Claims) -> str:
    """A line for each feature, a column for each kind of variant."""
    from tests.helpers.features import FEATURES, KINDS

    lines = [f"| | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for feature in FEATURES:
        cells = [cell(claims.get((feature, kind), {})) for kind in KINDS]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    legend = [f"- *{kind}*: {variants}" for kind, variants in KINDS.items()]
    return "\n".join([*lines, "", "Kinds of variant, as the columns name them:", "", *legend])


def cell(found: dict[bool, list[Test]]) -> str:
    """Works, refused, or (where some variants of a kind do and others don't) both, each a link to a test."""
    said = [f"[{'refused' if refused else 'works'}]({address(found[refused][0])})" for refused in sorted(found)]
    return ", ".join(said) or "no test"


def address(test: Test) -> str:
    return f"{TESTS.name}#{anchor(test)}"


def anchor(test: Test) -> str:
    return f"{Path(test[0]).stem}-{test[1]}".replace("_", "-")


def tests_page(claims: Claims) -> str:
    """The code of each test that a cell leads to."""
    tests = {found[refused][0] for found in claims.values() for refused in found}
    parts = [
        f"({anchor((file, function))})=\n## {function}\n\n`tests/{file}`\n\n"
        f"```{{literalinclude}} ../tests/{file}\n:language: python\n:pyobject: {function}\n```\n"
        for file, function in sorted(tests)
    ]
    head = "# The tests behind the matrix\n\nWhere the cells of [the matrix](compatibility.md) lead. `docs/compatibility.py` writes this page.\n\n"
    return head + "\n".join(parts)


def pages(folder: Path) -> dict[Path, str]:
    """What both pages ought to say."""
    claims = read_claims(folder / "claims.json")
    old = MATRIX.read_text(encoding="utf-8")
    return {MATRIX: PLACE.sub(rf"\g<1>\n{matrix(claims)}\n\n\g<2>", old), TESTS: tests_page(claims)}


def main(argv: list[str] | None = None) -> int:
    """Write or check both pages; how many are not what they should be."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--collect", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.collect:
        collect(arguments.collect)
    with tempfile.TemporaryDirectory() as folder:
        wanted = pages(Path(folder))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if arguments.check:
            sys.stderr.write(f"{path.name} is not what the tests say: run python -m docs.compatibility\n")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return len(stale) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
