"""Whether there are native kernels: built once and kept, done without where nothing builds them, and who says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_synthesizer.attend import attend, choose_route, native
from hf_synthesizer.attend.native import build
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import Static, Tiled
from hf_synthesizer.logits.masks import AttentionMask
from hf_synthesizer.measuring.doctor import examine

compiled = pytest.mark.compiler

SCRIPT = """
import torch
from hf_synthesizer import SynthesizerAttention
from hf_synthesizer.attend import native
layer = SynthesizerAttention(16, 2, variant="factorized_dense", max_length=40)
x = torch.randn(2, 40, 16)
fast, exact = layer(x, need_weights=False)[0], layer(x)[0]
assert (fast - exact).abs().max() < 1e-5, (fast - exact).abs().max()
fast.sum().backward()
print(native.unavailable_reason())
"""


def reason_in_new_process(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_compiler_everything_works_and_the_reason_is_named(tmp_path: Path) -> None:
    assert "compiler" in reason_in_new_process(CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))


@compiled
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo 1;; *) echo "no such instruction" >&2; exit 1;; esac\n'
    )
    failing.chmod(0o755)
    assert "no such instruction" in reason_in_new_process(CXX=str(failing), XDG_CACHE_HOME=str(tmp_path))


@compiled
def test_the_kernels_can_be_held_down_to_avx2_and_are_kept_in_the_cache(tmp_path: Path) -> None:
    environment = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "XDG_CACHE_HOME": str(tmp_path)}
    assert reason_in_new_process(**environment).strip() == "None"
    (kept,) = (tmp_path / "hf_synthesizer" / "native").glob("*.so")
    assert kept.name.startswith("avx2-")
    assert reason_in_new_process(**environment, PATH="").strip() == "None"  # it is there, and nothing is built


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    assert build.library() is None and "HF_SYNTHESIZER_NATIVE=0" in str(native.unavailable_reason())
    terms = Terms.of(Tiled(torch.randn(2, 2, 80, 8), torch.randn(2, 2, 80, 10), 80), AttentionMask())
    assert choose_route(terms, torch.randn(2, 2, 80, 4), AttentionMask(), 0.0) == "chunked"


def test_the_doctor_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    diagnosis = examine()
    assert "HF_SYNTHESIZER_NATIVE=0" in diagnosis.machine["native kernels"]
    assert any("native kernels" in note for note in diagnosis.notes)


@pytest.fixture
def nothing_builds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A process in which the kernels cannot be built, and that has not asked for them yet."""
    monkeypatch.setattr(
        build, "_load_or_build", lambda capability: (_ for _ in ()).throw(build.Unavailable("nothing builds"))
    )
    for name in ("HF_SYNTHESIZER_NATIVE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.WARNING, logger="hf_synthesizer.attend.native.build")
    build._load_library.cache_clear()
    build._warn_once.cache_clear()
    yield
    build._load_library.cache_clear()
    build._warn_once.cache_clear()


def forward() -> None:
    """A forward that the kernels would serve."""
    attend(Tiled(torch.randn(2, 2, 80, 8), torch.randn(2, 2, 80, 10), 80), torch.randn(2, 2, 80, 4))


@pytest.mark.usefixtures("nothing_builds")
def test_the_first_forward_that_could_use_the_kernels_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    assert native.unavailable_reason() is not None
    attend(Static(torch.randn(2, 3, 3)), torch.randn(1, 2, 3, 4), dropout=1.0)
    with native.without_kernels():
        forward()
    assert not caplog.records  # nobody has missed them so far
    forward()
    forward()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "HF_SYNTHESIZER_NATIVE=0" in record.getMessage()
    assert f"without its native kernels: {native.unavailable_reason()}. " in record.getMessage()


@pytest.mark.usefixtures("nothing_builds")
@pytest.mark.parametrize("quiet", ["turned off", "rank 1", "child process"])
def test_no_warning_where_the_user_turned_them_off_or_another_process_warns(
    quiet: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if quiet == "turned off":
        monkeypatch.setenv("HF_SYNTHESIZER_NATIVE", "0")
    elif quiet == "rank 1":
        monkeypatch.setenv("LOCAL_RANK", "1")
    else:
        monkeypatch.setattr(build.multiprocessing, "parent_process", lambda: object())
    forward()
    assert not caplog.records
