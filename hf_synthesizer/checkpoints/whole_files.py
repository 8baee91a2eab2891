"""Files of a user's that are written anew: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a text file beside the one that is there, and put it in its place once it is whole.

    A write that fails leaves the file that was there, and nothing beside it. A link stays a link, and the file keeps its mode.

    Raises:
        OSError, UnicodeEncodeError: for a file that cannot be written.
    """
    path = Path(os.path.realpath(path))
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    beside = Path(name)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, beside)
        else:
            mask = os.umask(0)
            os.umask(mask)
            beside.chmod(0o666 & ~mask)  # mkstemp's is for the owner alone
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
