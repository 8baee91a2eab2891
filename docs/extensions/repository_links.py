"""Links that lead out of `docs/`, as one reads them in the repository, lead to the page that holds the same file."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results/benchmarks.md",
    "benchmarks/tried.md": "results/tried.md",
    **{
        f"benchmarks/{name}/results.md": f"results/{name}.md"
        for name in ("block", "heads", "model", "paper", "pretrained")
    },
}
"""The documents outside `docs/` that have a page, because the page includes them."""
LINK = re.compile(r"(?<=\]\()((?!/|[a-z]+:)[^)#\s]+\.md)")


def lead_to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """`](../CONTRIBUTING.md)` becomes `](/contributing.md)` before a page is read."""
    _lead(source, PurePosixPath("docs") / name)


def lead_included_to_pages(app: Sphinx, path: Path, name: str, source: list[str]) -> None:
    """The same for a document that a page includes; its links count from its own folder."""
    file = Path(app.srcdir, path).resolve()
    _lead(source, PurePosixPath(file.relative_to(Path(app.srcdir).parent.resolve()).as_posix()))


def _lead(source: list[str], file: PurePosixPath) -> None:
    """Write links to Markdown as addresses of pages, counted from the root of the site."""

    def page(link: re.Match[str]) -> str:
        target = posixpath.normpath(file.parent / link[1])
        outside = not target.startswith("docs/")
        return "/" + PAGES[target] if target in PAGES else link[1] if outside else "/" + target.removeprefix("docs/")

    source[0] = LINK.sub(page, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", lead_to_pages)
    app.connect("include-read", lead_included_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
