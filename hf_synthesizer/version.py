"""The version of the library, and where a release of it is installed from: what a release changes, and nothing else does.

`setup.cfg` reads the version. Errors, model cards and the shim in every checkpoint say how to install the package.
"""

__version__ = "0.1.0"

REPOSITORY = ""
"""The address of the public repository, such as `https://…/hf_synthesizer`; empty until there is one."""

HOW_TO_INSTALL = (
    f"`pip install git+{REPOSITORY}`"
    if REPOSITORY
    else "`pip install .` in a clone of its repository; it is not on the package index, where the name may be somebody else's"
)
"""For the middle of a sentence. It must not hold a double quote, for the shim puts it between two."""
