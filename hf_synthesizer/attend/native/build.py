"""The native kernels' library: built by the machine's own compiler at first use, kept, and bound to what PyTorch has loaded.

The source needs no header of PyTorch, so that a build takes two seconds and serves every version of it: the matrix
products (oneDNN's, through PyTorch's `brgemm`) and the threads (those of the OpenMP that PyTorch runs on) are handed over as
addresses. One library is built for each instruction set, `torch.backends.cpu.get_cpu_capability()`, and kept in the user's
cache folder under a name that holds source and instruction set.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=default")
ARCHITECTURES = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
SECONDS = 120  # a compiler that takes longer is not waited for
PRODUCTS = "_ZN2at6native7cpublas6brgemmEllllllbPK{}S{}_Pfb"
SYMBOLS = (PRODUCTS.format("f", 3), PRODUCTS.format("N3c108BFloat16E", 5), "_ZN2at6native7cpublas14brgemm_releaseEb")
ADVICE = "Install g++ (or name a compiler in CXX) for the native kernels"


_left_out = False


class Library(NamedTuple):
    """The loaded kernels, and whether their products can be made of bfloat16 on this machine."""

    functions: ctypes.CDLL
    bfloat16: bool


class Unavailable(Exception):
    """Why there are no native kernels here."""


def library() -> Library | None:
    """The kernels for the instruction set that PyTorch uses, or None where there are none: `reason` says why."""
    if _left_out or os.environ.get("HF_SYNTHESIZER_NATIVE") == "0":
        return None
    return _made()[0]


@contextmanager
def left_out() -> Iterator[None]:
    """Do without the kernels for a while: who counts operations sees those of PyTorch alone."""
    global _left_out
    before, _left_out = _left_out, True
    try:
        yield
    finally:
        _left_out = before


def reason() -> str | None:
    """Why there are no native kernels, or None where there are."""
    if os.environ.get("HF_SYNTHESIZER_NATIVE") == "0":
        return "HF_SYNTHESIZER_NATIVE=0 turns them off"
    return _made()[1]


@cache
def _made() -> tuple[Library | None, str | None]:
    try:
        capability = torch.backends.cpu.get_cpu_capability()
        if sys.platform != "linux" or platform.machine() != "x86_64" or capability not in ARCHITECTURES:
            here = f"{capability} on {platform.machine()} under {platform.system()}"
            raise Unavailable(f"they are for AVX2 and AVX-512 on x86-64 under Linux, and this is {here}")
        return _bound(_built(capability)), None
    except (Unavailable, OSError) as error:
        logger.info("hf_synthesizer runs without its native kernels: %s.", error)
        return None, str(error)


def _built(capability: str) -> Path:
    """The library's file, made where it is not there yet."""
    architecture = list(ARCHITECTURES[capability])
    if capability == "AVX512" and "avx512_bf16" in _processor_flags():
        architecture.append("-mavx512bf16")
    sources = sorted(SOURCE.iterdir())
    told = [*FLAGS, *architecture, *(source.read_text() for source in sources)]
    name = f"{capability.lower()}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}.so"
    file = _folder() / name
    if file.exists():
        return file
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable(f"there is no C++ compiler. {ADVICE}")
    logger.info("Building the native kernels of hf_synthesizer for %s; they are kept as %s.", capability, file)
    with tempfile.TemporaryDirectory(dir=file.parent) as own:  # another process may build the same: the last one stays
        made = Path(own) / name
        _run([*compiler.split(), *FLAGS, *architecture, str(SOURCE / "kernel.cpp"), "-o", str(made)])
        made.replace(file)
    return file


def _bound(file: Path) -> Library:
    """The library with PyTorch's functions put in, tried out."""
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    addresses = []
    for symbol in (*SYMBOLS, "GOMP_parallel"):
        if not hasattr(torch_library, symbol):
            raise Unavailable(f"torch {torch.__version__} does not have what they call ({symbol})")
        addresses.append(ctypes.cast(getattr(torch_library, symbol), ctypes.c_void_p))
    functions = ctypes.CDLL(str(file))
    functions.hf_bind(*addresses)
    functions.hf_probe.argtypes = [ctypes.c_int64]
    for function in (
        functions.hf_probe,
        functions.hf_size,
        functions.hf_forward,
        functions.hf_backward,
        functions.hf_dropout,
    ):
        function.restype = ctypes.c_int64
    if functions.hf_probe(0):
        raise Unavailable("oneDNN has no float32 brgemm for this processor")
    return Library(functions, functions.hf_probe(1) == 0)


def _folder() -> Path:
    """Where libraries are kept: the user's cache folder, or where that cannot be written to one of this process."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_synthesizer" / "native"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        if os.access(kept, os.W_OK):
            return kept
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hf_synthesizer-"))


def _run(command: list[str]) -> str:
    """What a command prints; raises `Unavailable` with the end of what it complains about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C++ compiler could not be run ({error}). {ADVICE}") from error
    if done.returncode:
        raise Unavailable(f"the C++ compiler failed: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def _processor_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []
