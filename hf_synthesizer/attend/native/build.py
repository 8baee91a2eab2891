"""Builds the library of native kernels with the machine's compiler at first use, and binds it to PyTorch.

The source needs no header of PyTorch. So a build takes two seconds and works with every version of PyTorch. The
addresses of its matrix products (oneDNN's, through `brgemm`) and of its OpenMP threads are passed at run time. Each
instruction set, `torch.backends.cpu.get_cpu_capability()`, has its own library, in the user's cache folder
(`library_cache.py`). The file name holds the instruction set and a hash of the source. If the build fails, other routes
serve, and the first forward that could have used the kernels logs one warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import multiprocessing
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

from ...upstream import look_up
from ...upstream.torch_names import KERNEL_SYMBOLS
from . import library_cache
from .library_cache import Unavailable

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=default")
ARCHITECTURES = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
COMPILER_SECONDS = 120  # time limit of the compiler
FUNCTIONS = ("hf_bind", "hf_probe", "hf_size", "hf_forward", "hf_backward", "hf_dropout")
ADVICE = "Install g++, or name a compiler in CXX, for the native kernels"


_disabled = False


class Library(NamedTuple):
    """The loaded kernels, and whether this machine has bfloat16 matrix products."""

    functions: ctypes.CDLL
    bfloat16: bool


def library() -> Library | None:
    """The kernels for PyTorch's instruction set, or None: `unavailable_reason` and one warning say why."""
    if _disabled or os.environ.get("HF_SYNTHESIZER_NATIVE") == "0":
        return None
    kernels, reason = _load_library()
    if kernels is None:
        _warn_once(reason)
    return kernels


@cache
def _warn_once(reason: str | None) -> None:
    """Log a warning; in a child process and on all ranks but the first, log it as information."""
    in_parent = multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0"
    logger.log(
        logging.WARNING if in_parent else logging.INFO,
        "hf_synthesizer runs without its native kernels: %s. Other routes serve, exact but slower. "
        "Set HF_SYNTHESIZER_NATIVE=0 to turn the kernels and this warning off.",
        reason,
    )


@contextmanager
def without_kernels() -> Iterator[None]:
    """Turn the kernels off inside the context. Counters of operations see only PyTorch's own."""
    global _disabled
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before


def unavailable_reason() -> str | None:
    """Why the native kernels are unavailable; None if they are available."""
    if os.environ.get("HF_SYNTHESIZER_NATIVE") == "0":
        return "HF_SYNTHESIZER_NATIVE=0 turns them off"
    return _load_library()[1]


@cache
def _load_library() -> tuple[Library | None, str | None]:
    try:
        capability = torch.backends.cpu.get_cpu_capability()
        if sys.platform != "linux" or platform.machine() != "x86_64" or capability not in ARCHITECTURES:
            here = f"{capability} on {platform.machine()} under {platform.system()}"
            raise Unavailable(f"they need AVX2 or AVX-512 on x86-64 under Linux, and this is {here}")
        addresses = _symbol_addresses()
        return _bind(_load_or_build(capability), addresses), None
    except Exception as error:  # errors of compiler, loader and file system have no common class
        explanation = str(error) if isinstance(error, (Unavailable, OSError)) else f"{type(error).__name__}: {error}"
        return None, explanation


def _load_or_build(capability: str) -> ctypes.CDLL:
    """The cached library, or a new one if the cache has none that can be trusted."""
    architecture = list(ARCHITECTURES[capability])
    if capability == "AVX512" and "avx512_bf16" in _processor_flags():
        architecture.append("-mavx512bf16")
    sources = sorted(SOURCE.iterdir())
    hashed = [*FLAGS, *architecture, *(source.read_text() for source in sources)]
    name = f"{capability.lower()}-{hashlib.sha256(chr(0).join(hashed).encode()).hexdigest()[:16]}.so"
    functions = library_cache.load_library(name, _open_library)
    return _build(name, capability, architecture) if functions is None else functions


def _build(name: str, capability: str, architecture: list[str]) -> ctypes.CDLL:
    """Compile the library and cache it under `name`."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable(f"there is no C++ compiler. {ADVICE}")
    with library_cache.reserve(name) as (file, store), tempfile.TemporaryDirectory(prefix="hf_synthesizer-") as folder:
        library_file = Path(folder) / name
        logger.info("Building the native kernels of hf_synthesizer for %s in %s.", capability, file)
        _run_compiler([*compiler.split(), *FLAGS, *architecture, str(SOURCE / "kernel.cpp"), "-o", str(library_file)])
        functions = _open_library(str(library_file))  # before it is cached: only a valid library may be found again
        store(library_file.read_bytes())
    return functions


def _open_library(file: str) -> ctypes.CDLL:
    try:
        functions = ctypes.CDLL(file)
    except OSError as error:
        raise Unavailable(f"what the C++ compiler made cannot be loaded ({error}). {ADVICE}") from error
    missing = [name for name in FUNCTIONS if not hasattr(functions, name)]
    if missing:
        raise Unavailable(f"what the C++ compiler made lacks {', '.join(missing)}. {ADVICE}")
    return functions


def _symbol_addresses() -> list[ctypes.c_void_p]:
    """The addresses of the PyTorch functions that the kernels call."""
    addresses = {symbol: look_up(symbol) for symbol in KERNEL_SYMBOLS}
    missing = [symbol for symbol, address in addresses.items() if address is None]
    if missing:
        raise Unavailable(
            f"torch {torch.__version__} lacks a function that they call ({missing[0].partition(':')[2]})"
        )
    return list(addresses.values())


def _bind(functions: ctypes.CDLL, addresses: list[ctypes.c_void_p]) -> Library:
    """Pass PyTorch's functions to the library, and test them."""
    for name in FUNCTIONS:
        getattr(functions, name).restype = ctypes.c_int64
    functions.hf_bind.restype = None
    functions.hf_bind(*addresses)
    functions.hf_probe.argtypes = [ctypes.c_int64]
    if functions.hf_probe(0):
        raise Unavailable("oneDNN has no float32 brgemm for this processor")
    return Library(functions, functions.hf_probe(1) == 0)


def _run_compiler(command: list[str]) -> str:
    """Run the compiler and return its output.

    Raises:
        Unavailable: if it fails, with the end of its error messages.
    """
    try:
        completed = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C++ compiler could not be run ({error}). {ADVICE}") from error
    if completed.returncode:
        raise Unavailable(f"the C++ compiler failed: {' '.join(completed.stderr.split())[-300:]}")
    return completed.stdout


def _processor_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []
