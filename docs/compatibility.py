"""Writes the matrix of docs/compatibility.md, and the tests behind it, from the markers `feature` in the tests.

    python -m docs.compatibility          # writes both pages
    python -m docs.compatibility --check  # only says whether both pages agree with the markers

A cell says what the markers of its tests claim. A test fails if it does not do what its marker claims (tests/helpers/features.py).
This script collects the tests and does not run them.
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
"""File below `tests/`, and function."""
Claims = dict[tuple[str, str], dict[bool, list[Test]]]
"""For each feature and kind of variant: the tests that say it works (False), and those that say it is refused (True)."""


class Collector:
    """A plugin of pytest that writes the claims of the collected tests to a file."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_collection_finish(self, session) -> None:
        from tests.helpers.features import claims

        collected = {
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
        self.path.write_text(json.dumps(sorted(collected)), encoding="utf-8")


def collect(path: Path) -> None:
    """Write the claims of all tests, slow ones included, to a file."""
    import pytest

    marked = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.feature(" in file.read_text("utf-8")]
    options = ["--collect-only", "-q", "-m", "feature", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    sys.exit(pytest.main([*options, *marked], plugins=[Collector(path)]))


def read_claims(path: Path) -> Claims:
    """The claims that `collect` writes. It runs in another process, because pytest changes the process it runs in."""
    command = [sys.executable, "-m", "docs.compatibility", "--collect", str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stdout + process.stderr)
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


def cell(tests: dict[bool, list[Test]]) -> str:
    """The words works, refused or both (where variants of a kind differ), each a link to a test."""
    links = [f"[{'refused' if refused else 'works'}]({address(tests[refused][0])})" for refused in sorted(tests)]
    return ", ".join(links) or "no test"


def address(test: Test) -> str:
    return f"{TESTS.name}#{anchor(test)}"


def anchor(test: Test) -> str:
    return f"{Path(test[0]).stem}-{test[1]}".replace("_", "-")


def tests_page(claims: Claims) -> str:
    """The code of each test that a cell links to."""
    tests = {claimed[refused][0] for claimed in claims.values() for refused in claimed}
    parts = [
        f"({anchor((file, function))})=\n## {function}\n\n`tests/{file}`\n\n"
        f"```{{literalinclude}} ../tests/{file}\n:language: python\n:pyobject: {function}\n```\n"
        for file, function in sorted(tests)
    ]
    head = "# The tests behind the matrix\n\nThe cells of [the matrix](compatibility.md) link to these tests. `docs/compatibility.py` writes this page.\n\n"
    return head + "\n".join(parts)


def pages(folder: Path) -> dict[Path, str]:
    """The text that both pages should have."""
    claims = read_claims(folder / "claims.json")
    old = MATRIX.read_text(encoding="utf-8")
    return {MATRIX: PLACE.sub(rf"\g<1>\n{matrix(claims)}\n\n\g<2>", old), TESTS: tests_page(claims)}


def main(argv: list[str] | None = None) -> int:
    """Write or check both pages. Returns how many pages are out of date."""
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
            sys.stderr.write(f"{path.name} is out of date: run python -m docs.compatibility\n")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return len(stale) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
