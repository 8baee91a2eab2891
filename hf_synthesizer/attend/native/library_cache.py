"""The cache of built libraries: files that only this user can write, verified before they are loaded.

A file holds the library's bytes, followed by their digest, which the loader ignores. A file is loaded only if it
belongs to this user, nobody else may write to it, and the digest is correct. Otherwise the library is built again. A
file is written under a temporary name and then renamed, so it is never incomplete.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
HOUR_IN_SECONDS = 3600
DIGEST = hashlib.sha256().digest_size
ADVICE = "Set XDG_CACHE_HOME to a folder of your own"
Loaded = TypeVar("Loaded")


class Unavailable(Exception):
    """Why there are no native kernels here."""


def cache_folder() -> Path:
    """The user's cache folder, created if it is missing.

    Raises:
        Unavailable: if it cannot be created, or others may write to it.
    """
    named = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        home = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:  # no HOME, and no entry of this user
        raise Unavailable(f"this user has no home folder for their cache. {ADVICE}") from error
    folder = home / "hf_synthesizer" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid() and status.st_mode & WRITABLE_BY_OTHERS:
            folder.chmod(0o700)
            status = folder.stat()
    except OSError as error:
        raise Unavailable(f"they cannot be kept ({error}). {ADVICE}") from error
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise Unavailable(f"{folder} belongs to another user, or others may write to it. {ADVICE}")
    return folder


def load_library(name: str, bind: Callable[[str], Loaded]) -> Loaded | None:
    """`bind(path)` of a cached library; None if the cache has none that can be trusted."""
    file = cache_folder() / name
    try:
        # The open file is checked and then loaded, even if another file takes its name in between.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("%s cannot be read (%s); it is built anew.", file, error)
        return None
    status = os.fstat(descriptor)
    trusted = (
        stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS
    )
    if not (trusted and _has_valid_digest(name, descriptor)):
        os.close(descriptor)
        what = "is damaged" if trusted else "belongs to another user, or others may write to it"
        logger.info("%s %s; it is built anew.", file, what)
        return None
    # Never closed: the loader identifies a library by this path, and the number could later mean another file.
    return bind(f"/proc/self/fd/{descriptor}")


@contextmanager
def reserve(name: str) -> Iterator[tuple[Path, Callable[[bytes], None]]]:
    """The path of a new library, and a function that stores its bytes there.

    A temporary file is opened before the build starts.

    Raises:
        Unavailable: if nothing can be written.
    """
    folder = cache_folder()
    _remove_abandoned(folder)
    try:
        descriptor, written = tempfile.mkstemp(prefix=f"{name}.", dir=folder)  # only this user may write it
    except OSError as error:
        raise Unavailable(f"they cannot be kept ({error}). {ADVICE}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:

            def store(content: bytes) -> None:
                file.write(content + _digest(name, content))
                file.flush()
                os.replace(written, folder / name)

            yield folder / name, store
    finally:
        with suppress(FileNotFoundError):
            os.unlink(written)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that were killed during a build."""
    for abandoned in folder.glob("*.so.*"):
        with suppress(OSError):
            if abandoned.stat().st_mtime < time.time() - HOUR_IN_SECONDS:
                abandoned.unlink()


def _has_valid_digest(name: str, descriptor: int) -> bool:
    with os.fdopen(descriptor, "rb", closefd=False) as opened:
        content = opened.read()
    return len(content) > DIGEST and content[-DIGEST:] == _digest(name, content[:-DIGEST])


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()
