"""`examine`: what this machine has, what is slow or missing on it, and whether every route computes what it should."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from ..attend import ROUTES, as_accelerator, native, reference, sparse
from ..attend.terms import Terms
from ..logits.forms import Sparse
from ..logits.masks import AttentionMask
from ..synthesizers import build_synthesizer, list_variants
from ..synthesizers.config import SynthesizerConfig

PACKAGES = ("hf_synthesizer", "torch", "transformers", "accelerate", "huggingface_hub", "safetensors")
EXTRAS = {
    "matplotlib": "plots",
    "datasets": "fine-tuning on GLUE",
    "evaluate": "fine-tuning on GLUE",
    "sklearn": "fine-tuning on GLUE",
    "scipy": "fine-tuning on GLUE",
    "peft": "LoRA",
    "onnx": "export",
    "triton": "kernels for GPUs",
}
HIDDEN, HEADS, LENGTH, BATCH = 32, 4, 48, 2
TOLERANCE = 1e-4
"""In float32, of outputs about 1."""
MIXTURES = ("random+salience", "dense+salience", "random+dense", "factorized_random+dense", "factorized_dense+random")


@dataclass(frozen=True)
class RouteCheck:
    """One route on one device: how many forms it computed, and the largest difference to the reference."""

    route: str
    device: str
    forms: int
    error: float | None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing differs; a route that serves nothing here cannot."""
        return self.error is None or self.error < TOLERANCE


@dataclass(frozen=True)
class Diagnosis:
    """Prints as a page. `passed` says whether every route agrees with the reference."""

    versions: dict[str, str]
    machine: dict[str, str]
    missing: dict[str, str]
    notes: tuple[str, ...]
    routes: tuple[RouteCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.routes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **asdict(self),
            "routes": [{**asdict(check), "passed": check.passed} for check in self.routes],
            "passed": self.passed,
        }

    def __str__(self) -> str:
        lines = ["versions"]
        lines += [f"  {name:18}{found}" for name, found in self.versions.items()]
        lines += ["machine", *(f"  {name:18}{found}" for name, found in self.machine.items())]
        if self.missing:
            lines += ["not installed", *(f"  {name:18}needed for {use}" for name, use in self.missing.items())]
        lines += ["routes, compared with the reference"]
        for check in self.routes:
            if check.error is None:
                result = check.note
            else:
                result = f"{'agrees' if check.passed else 'DIFFERS'}: {check.forms} forms, largest difference {check.error:.1e}"
            lines.append(f"  {check.route:10}{check.device:8}{result}")
        lines += ["notes", *(f"  - {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


def examine() -> Diagnosis:
    """Look at this machine, and compare every route with the reference on each of its devices; takes seconds."""
    missing = {name: use for name, use in EXTRAS.items() if find_spec(name) is None}
    return Diagnosis(_versions(), _machine(), missing, tuple(_notes()), tuple(_check_routes()))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _devices() -> list[str]:
    others = [kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available()]
    return ["cpu", *others]


def _compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "devices": ", ".join(_devices()),
        "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
        "backends": "eager, sdpa",
        "C++ compiler": _compiler() or "none",
        "native kernels": native.unavailable_reason() or "yes",
    }


def _notes() -> Iterator[str]:
    if not torch.backends.mkldnn.is_available():
        yield "torch was built without oneDNN: projections take its slower matrix library."
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() and platform.machine() in ("x86_64", "AMD64"):
        yield "The processor has no AVX-512: bfloat16 is slower than float32 on it."
    if _compiler() is None:
        yield "There is no C++ compiler: torch.compile does not work on the processor."
    if native.unavailable_reason() is not None:
        yield f"There are no native kernels, and other exact routes serve, more slowly: {native.unavailable_reason()}."
    if torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1:
        yield "torch uses one thread of several cores (OMP_NUM_THREADS, torch.set_num_threads)."
    if torch.cuda.is_available() and find_spec("triton") is None:
        yield "Triton is not installed: the GPU takes the chunked route, which is slower than its kernels."
    if sys.platform == "win32":
        yield "torch.compile and Triton are not tested on Windows."
    yield "The attention backends are eager and sdpa; flash_attention_2 and flex_attention are refused with a message."


def _check_routes() -> Iterator[RouteCheck]:
    for device in _devices():
        for name in (*ROUTES, "sparse"):
            # A processor takes the routes of other devices only when it is told to.
            elsewhere = device == "cpu" and name == "triton"
            with as_accelerator() if elsewhere else nullcontext(), torch.no_grad():
                errors = list(_errors(name, torch.device(device)))
            note = "" if errors else "serves nothing on this device"
            yield RouteCheck(name, device, len(errors), max(errors, default=None), note)


def _errors(name: str, device: torch.device) -> Iterator[float]:
    """The largest difference for each form that the route serves, with padding and as a decoder."""
    for variant in (*list_variants(), *MIXTURES):
        if variant == "salience":  # a part of mixtures
            continue
        for causal in (False, True):
            mask = AttentionMask(causal_offset=0) if causal else AttentionMask(keep=_keep(device))
            synthesizer = build_synthesizer(SynthesizerConfig(variant), HIDDEN, HEADS, LENGTH).to(device).eval()
            if causal and synthesizer.whole_sequence:
                continue
            generator = torch.Generator().manual_seed(0)
            hidden_states = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(device)
            value = torch.randn(BATCH, HEADS, LENGTH, HIDDEN // HEADS, generator=generator).to(device)
            synthesizer.set_causal(causal)
            logits = synthesizer(hidden_states)
            found = _through(name, logits, value, mask)
            if found is not None:
                wanted, _ = reference.reference_attention(logits, value, mask)
                yield float((found - wanted).abs().max())


def _keep(device: torch.device) -> torch.Tensor:
    lengths = torch.tensor([LENGTH, LENGTH - 7], device=device)
    return (torch.arange(LENGTH, device=device) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, L)


def _through(name: str, logits: Any, value: torch.Tensor, mask: AttentionMask) -> torch.Tensor | None:
    """The output by that route, or None where it does not serve these logits."""
    simple = mask.simplified()
    if isinstance(logits, Sparse):
        if name != "sparse" or not sparse.serves(logits, value, simple):
            return None
        return sparse.sparse_attention(logits, value, simple, logits.require_direction(mask), 0.0)
    if name == "sparse":
        return None
    terms = Terms.of(logits, simple)
    if not ROUTES[name].serves(terms, value, simple, 0.0):
        return None
    if name != "static":
        terms.materialize_weights()
    return ROUTES[name].attention(terms, value, simple, 0.0)
