"""How the site is built: `make docs`, from the root of the repository. Nothing here asks a network, and neither do the pages."""

from __future__ import annotations

import hf_synthesizer

project = "hf_synthesizer"
author = "The hf_synthesizer contributors"
copyright = author
version = release = hf_synthesizer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extensions.mathml",
    "docs.extensions.repository_links",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_math_renderer = "mathml"
html_copy_source = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # docstrings mark code by single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
nitpicky = False
