"""`examine`: the features of this machine, what is slow or missing on it, and whether every route computes correctly."""

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
    **dict.fromkeys(("datasets", "evaluate", "sklearn", "scipy"), "fine-tuning on GLUE"),
    "peft": "LoRA",
    "onnx": "export",
    "triton": "kernels for GPUs",
}
HIDDEN, HEADS, LENGTH, BATCH = 32, 4, 48, 2
TOLERANCE = 1e-4
"""The largest allowed difference in float32, for outputs about 1."""
MIXTURES = ("random+salience", "dense+salience", "random+dense", "factorized_random+dense", "factorized_dense+random")


@dataclass(frozen=True)
class RouteCheck:
    """One route on one device: the number of forms that it computed, and its largest difference from the reference."""

    route: str
    device: str
    forms: int
    error: float | None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the route agrees with the reference. A route that serves nothing here passes."""
        return self.error is None or self.error < TOLERANCE


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`. Prints as a page."""

    versions: dict[str, str]
    machine: dict[str, str]
    missing: dict[str, str]
    notes: tuple[str, ...]
    routes: tuple[RouteCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every route agrees with the reference."""
        return all(check.passed for check in self.routes)

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` accepts."""
        routes = [{**asdict(check), "passed": check.passed} for check in self.routes]
        return {**asdict(self), "routes": routes, "passed": self.passed}

    def __str__(self) -> str:
        missing = {name: f"needed for {use}" for name, use in self.missing.items()}
        lines = []
        for title, values in (("versions", self.versions), ("machine", self.machine), ("not installed", missing)):
            lines += [title, *(f"  {name:18}{value}" for name, value in values.items())] if values else []
        lines.append("routes, compared with the reference")
        for check in self.routes:
            result = check.note
            if check.error is not None:
                verdict = "agrees" if check.passed else "DIFFERS"
                result = f"{verdict}: {check.forms} forms, largest difference {check.error:.1e}"
            lines.append(f"  {check.route:10}{check.device:8}{result}")
        lines += ["notes", *(f"  - {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


def examine() -> Diagnosis:
    """Examine this machine, and compare every route with the reference on each device. This takes seconds."""
    missing = {name: use for name, use in EXTRAS.items() if find_spec(name) is None}
    return Diagnosis(_versions(), _machine(), missing, tuple(_notes()), tuple(_check_routes()))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions


def _devices() -> list[str]:
    return ["cpu", *(kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available())]


def _compiler() -> str | None:
    paths = [shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    return next(filter(None, paths), None)


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
        yield "torch was built without oneDNN: projections use its slower matrix library."
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() and platform.machine() in ("x86_64", "AMD64"):
        yield "The processor has no AVX-512: bfloat16 is slower than float32 on it."
    if _compiler() is None:
        yield "There is no C++ compiler: torch.compile does not work on the processor."
    if native.unavailable_reason() is not None:
        yield f"There are no native kernels, so slower routes compute the same: {native.unavailable_reason()}."
    if torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1:
        yield "torch uses one thread of several cores (OMP_NUM_THREADS, torch.set_num_threads)."
    if torch.cuda.is_available() and find_spec("triton") is None:
        yield "Triton is not installed: the GPU uses the chunked route, which is slower than Triton's kernels."
    if sys.platform == "win32":
        yield "torch.compile and Triton are not tested on Windows."
    yield "The attention backends are eager and sdpa; flash_attention_2 and flex_attention are refused with a message."


def _check_routes() -> Iterator[RouteCheck]:
    for device in _devices():
        for name in (*ROUTES, "sparse"):
            accelerated = device == "cpu" and name == "triton"  # which serves a CPU only inside this context
            with as_accelerator() if accelerated else nullcontext(), torch.no_grad():
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
            output = _output_of_route(name, logits, value, mask)
            if output is not None:
                expected, _ = reference.reference_attention(logits, value, mask)
                yield float((output - expected).abs().max())


def _keep(device: torch.device) -> torch.Tensor:
    lengths = torch.tensor([LENGTH, LENGTH - 7], device=device)
    return (torch.arange(LENGTH, device=device) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, L)


def _output_of_route(name: str, logits: Any, value: torch.Tensor, mask: AttentionMask) -> torch.Tensor | None:
    """The output of a route. None if it does not serve these logits."""
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
