"""Where the native kernels are kept: what is loaded is this user's own and whole, and whatever fails leaves the other routes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_synthesizer.attend import attend, native, reference
from hf_synthesizer.attend.native import build, library_cache
from hf_synthesizer.logits.forms import Tiled
from hf_synthesizer.logits.masks import AttentionMask

compiled = pytest.mark.compiler
NAME = "avx2-0123456789abcdef.so"
QUICK_FLAGS = ("-O0", *build.FLAGS[1:])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has not asked for the kernels yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._load_library.cache_clear()
    build._warn_once.cache_clear()
    yield tmp_path / "hf_synthesizer" / "native"
    build._load_library.cache_clear()
    build._warn_once.cache_clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kept library, built once and in little time."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", QUICK_FLAGS)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        build._load_library.cache_clear()
        assert build.library() is not None, build.unavailable_reason()
        build._load_library.cache_clear()
    (file,) = (folder / "hf_synthesizer" / "native").iterdir()
    return file


def put(content: bytes, name: str = NAME) -> Path:
    with library_cache.reserve(name) as (file, place):
        place(content)
    return file


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def require_other_routes() -> None:
    """Attention is served, without the native kernels."""
    logits = Tiled(torch.randn(2, 2, 80, 8), torch.randn(2, 2, 80, 10), 80)
    value = torch.randn(2, 2, 80, 4)
    assert build.library() is None
    torch.testing.assert_close(
        attend(logits, value)[0], reference.reference_attention(logits, value, AttentionMask())[0]
    )


def test_what_was_kept_is_found_again(cache: Path) -> None:
    assert library_cache.load_library(NAME, str) is None
    file = put(b"library")
    assert file.parent == cache and [*cache.iterdir()] == [file]
    actual = library_cache.load_library(NAME, lambda path: Path(path).read_bytes())
    assert actual is not None and actual.startswith(b"library")


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "flipped digest", "longer"])
def test_a_damaged_file_is_not_loaded(damage: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_synthesizer")
    file = put(bytes(range(256)) * 40)
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "emptied":
        content.clear()
    elif damage == "longer":
        content += b"\0"
    else:
        content[100 if damage == "flipped" else -1] ^= 1
    file.write_bytes(content)
    assert library_cache.load_library(NAME, str) is None
    assert caplog.text.count("is damaged; it is built anew") == 1


def test_a_file_under_another_instruction_sets_name_is_not_loaded(cache: Path) -> None:
    other = put(b"library").rename(cache / "avx512-0123456789abcdef.so")
    assert library_cache.load_library(other.name, str) is None


def test_a_file_that_others_may_write_to_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_synthesizer")
    file = put(b"library")
    for mode in (0o666, 0o620, 0o602):
        file.chmod(mode)
        caplog.clear()
        assert library_cache.load_library(NAME, str) is None
        assert "others may write to it" in caplog.text
    file.chmod(0o600)
    assert library_cache.load_library(NAME, str) is not None


def test_a_file_of_another_owner_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(b"library")
    looked = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        status = [*looked(descriptor)]
        status[4] += 1  # its owner
        return os.stat_result(status)

    monkeypatch.setattr(library_cache.os, "fstat", foreign)
    assert library_cache.load_library(NAME, lambda path: pytest.fail("it was loaded")) is None


def test_a_link_to_a_library_is_not_loaded(cache: Path) -> None:
    file = put(b"library")
    moved = file.rename(cache / "elsewhere")
    file.symlink_to(moved)
    assert library_cache.load_library(NAME, str) is None


def test_a_shared_folder_of_another_owner_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(b"library")
    user = os.geteuid()
    monkeypatch.setattr(library_cache.os, "geteuid", lambda: user + 1)
    assert "belongs to another user" in str(native.unavailable_reason()) and "XDG_CACHE_HOME" in str(
        native.unavailable_reason()
    )
    require_other_routes()


def test_a_folder_that_others_may_write_to_is_taken_for_this_user_alone(cache: Path) -> None:
    put(b"library")
    cache.chmod(0o777)
    assert library_cache.load_library(NAME, str) is not None
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_is_this_users_alone_whatever_the_umask_is(cache: Path) -> None:
    before = os.umask(0)
    try:
        file = put(b"library")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700


def test_a_build_that_breaks_off_leaves_nothing(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt), library_cache.reserve(NAME):
        raise KeyboardInterrupt
    assert not [*cache.iterdir()]


def test_what_killed_builds_left_is_removed_by_a_later_one(cache: Path) -> None:
    file = put(b"library")
    left, fresh = (file.with_name(f"{NAME}.{end}") for end in ("old", "new"))
    for each in (left, fresh):
        each.touch()
    os.utime(left, (time.time() - 2 * library_cache.HOUR_IN_SECONDS,) * 2)
    put(b"library")
    assert not left.exists() and fresh.exists()


@compiled
def test_a_damaged_library_is_built_anew(whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", QUICK_FLAGS)
    cache.mkdir(parents=True, mode=0o700)
    copy = Path(shutil.copy(whole, cache))
    copy.write_bytes(whole.read_bytes()[:5000])
    assert build.library() is not None
    assert copy.stat().st_size == pytest.approx(whole.stat().st_size, rel=0.1)


@compiled
def test_a_truncated_library_without_a_compiler_ends_no_process(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", QUICK_FLAGS)
    no_compiler(monkeypatch)
    cache.mkdir(parents=True, mode=0o700)
    copy = Path(shutil.copy(whole, cache))
    assert build.library() is not None  # as it is
    build._load_library.cache_clear()
    copy.write_bytes(whole.read_bytes()[:5000])
    assert "compiler" in str(native.unavailable_reason())
    require_other_routes()


def fake_compiler(folder: Path, *lines: str) -> str:
    file = folder / "compiler"
    file.write_text("\n".join(("#!/bin/sh", "for last; do :; done", *lines)) + "\n")
    file.chmod(0o755)
    return str(file)


FAILURES = {
    "it prints no UTF-8": ("printf 'na\\377ve \\351rror' >&2; exit 1", "na\ufffdve"),
    "it makes no library": ('echo text > "$last"', "cannot be loaded"),
    "it makes an empty file": (': > "$last"', "cannot be loaded"),
    "it makes nothing": ("exit 0", "cannot be loaded"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_compiler_that_does_not_do_its_work_is_one_line_of_the_log(
    failure: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, reason = FAILURES[failure]
    monkeypatch.setenv("CXX", fake_compiler(cache.parents[1], script))
    monkeypatch.setattr(build.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    caplog.set_level(logging.INFO, logger="hf_synthesizer")
    require_other_routes()
    require_other_routes()
    assert reason in str(native.unavailable_reason())
    assert caplog.text.count("runs without its native kernels") == 1
    assert not [*cache.iterdir()]


@compiled
def test_a_library_without_our_symbols_is_left_out_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cache.parents[1] / "other.cpp"
    source.write_text('extern "C" int hf_size() { return 0; }\n')
    command = f'exec {os.environ.get("CXX") or "g++"} -shared -fPIC "{source}" -o "$last"'
    monkeypatch.setenv("CXX", fake_compiler(cache.parents[1], command))
    assert "lacks hf_bind, hf_probe, hf_forward" in str(native.unavailable_reason())
    require_other_routes()
    assert not [*cache.iterdir()]


def test_a_cache_that_cannot_be_written_leaves_nothing_and_builds_nothing(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is mounted to be read."""
    cache.mkdir(parents=True, mode=0o700)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def refused(*arguments: object, dir: Path, **options: object) -> None:
        assert dir == cache
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(library_cache.tempfile, "mkstemp", refused)
    monkeypatch.setattr(build, "_run_compiler", lambda command: pytest.fail("it was built"))
    monkeypatch.setenv("CXX", "g++")
    assert "cannot be kept" in str(native.unavailable_reason()) and "XDG_CACHE_HOME" in str(
        native.unavailable_reason()
    )
    require_other_routes()
    assert not [*temporary.iterdir()]


def test_a_cache_folder_that_cannot_be_made_is_one_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    caplog.set_level(logging.INFO, logger="hf_synthesizer")
    build._load_library.cache_clear()
    build._warn_once.cache_clear()
    try:
        require_other_routes()
        assert "cannot be kept" in caplog.text
    finally:
        build._load_library.cache_clear()


def test_a_relative_cache_folder_is_not_looked_for_where_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library_cache.cache_folder() == tmp_path / ".cache" / "hf_synthesizer" / "native"


SCRIPT = """
import os, pwd
def unknown(user): raise KeyError(user)
pwd.getpwuid = unknown
import torch
from hf_synthesizer import SynthesizerAttention
from hf_synthesizer.attend import native
layer = SynthesizerAttention(16, 2, variant="factorized_dense", max_length=40)
layer(torch.randn(2, 40, 16), need_weights=False)[0].sum().backward()
print(native.unavailable_reason())
"""


def test_a_user_without_a_home_and_without_an_entry_is_served_by_the_other_routes() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no home folder" in done.stdout or "x86-64" in done.stdout
