"""Links that lead out of `docs/`, as one reads them in the repository, lead to the page that holds the same file."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The documents of the repository's root that have a page, because the page includes them."""
OUTWARD = re.compile(rf"\]\(\.\./({'|'.join(map(re.escape, PAGES))})(#[^)]*)?\)")


def lead_to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """`](../CONTRIBUTING.md)` becomes `](contributing.md)` before a page is read."""
    source[0] = OUTWARD.sub(lambda link: f"]({PAGES[link[1]]}{link[2] or ''})", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
