"""What the Triton kernels take of a GPU, found without one: each is compiled for sm_80 and sm_90, and its machine code read.

    make test-kernels                    # installs Triton; a test also compiles all of them and holds them to the limits
    python -m benchmarks.scaling.kernel_resources  # about five minutes; writes benchmarks/results/kernels.csv

`registers` are those of a thread; `spilled_bytes`, what a thread keeps in local memory because it has too few; `shared_bytes`
and `warps` are a program's; `occupancy` is the share of a multiprocessor's warps that these leave room for. None of it
is a speed.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.measurements.records import RESULTS, commit, quick_output
from hf_synthesizer.attend.triton import launch
from hf_synthesizer.attend.triton.blocks import KERNELS, Blocks, Specialisation
from hf_synthesizer.attend.triton.launch import Launch, Operands

FIELDS = (
    *("architecture", "kernel", "dtype", "width", "low_rank", "static", "tiled", "rows", "keys", "warps", "stages"),
    *("registers", "spilled_bytes", "shared_bytes", "occupancy", "triton", "hf_synthesizer", "commit"),
)


class Architecture(NamedTuple):
    """The limits of a GPU, of each multiprocessor but for `shared_of_program`."""

    shared_of_program: int
    shared: int
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def occupancy(self, warps: int, registers: int, shared: int) -> float:
        """The share of the warps that run at a time, if there are programs enough."""
        of_a_warp = (
            -(-registers * 32 // 256) * 256
        )  # registers are dealt out by 256, and shared memory has 1 KiB of its own
        programs = min(
            self.warps // warps, self.registers // (of_a_warp * warps), self.shared // (shared + 1024), self.programs
        )
        return programs * warps / self.warps


ARCHITECTURES = {80: Architecture(163 << 10, 164 << 10), 90: Architecture(227 << 10, 228 << 10)}


class AbsentDevice:
    """What Triton asks of a GPU's driver when it compiles and does not run."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(architecture: int) -> Iterator[None]:
    """Within it, a launch compiles its kernel for a GPU that is not there, gives what came out, and runs nothing."""

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], blocks: Blocks) -> Any:
        return kernel.warmup(grid=grid, **arguments, **launch.compiler_options(blocks))

    before, launch.call_kernel = launch.call_kernel, compile_only
    driver.set_active(AbsentDevice(architecture))
    try:
        yield
    finally:
        launch.call_kernel = before


def compiled(specialisation: Specialisation, architecture: int) -> Any:
    """A kernel's machine code, by the very call that launches it."""
    batch, heads, length, width, dtype = 2, 3, 50, specialisation.width, specialisation.dtype
    wide = torch.empty(batch, heads, length, width, dtype=dtype)
    rows = torch.empty(batch, heads, length)
    factor = torch.empty(batch, heads, length, 8) if specialisation.tiled else None
    table = torch.empty(heads, length, length) if specialisation.static else None
    term = wide if specialisation.low_rank else None
    operands = Operands(wide, term, term, table, None if table is None else torch.empty(heads), factor, factor, rows)
    made = Launch(specialisation, batch, heads, length, length, 8, 8, length, 0.1, 0)
    common = {**launch.strided("output_grad", wide), "normaliser": rows, "delta": rows}
    further: dict[str, dict[str, Any]] = {
        "forward": {**launch.strided("output", wide), "normaliser": rows},
        "keys": {**common, "value_grad": wide, "key_grad": term, "bias_grad": rows},
        "queries": {**common, "query_grad": term, "inner_grad": factor, "outer_grad": factor},
        "table": {**common, "table_grad": table},
    }
    with compiling(architecture):
        return made.run(specialisation.kernel, operands, further[specialisation.kernel])


def resources(code: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and bytes of shared memory, as the machine code says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": code.metadata.shared,
    }


@cache
def provenance() -> dict[str, str]:
    return {"triton": triton.__version__, "hf_synthesizer": version("hf_synthesizer"), "commit": commit()}


def line(specialisation: Specialisation, number: int) -> dict[str, Any]:
    """One line of the table."""
    found = resources(compiled(specialisation, number))
    blocks = specialisation.blocks
    occupancy = ARCHITECTURES[number].occupancy(blocks.warps, found["registers"], found["shared_bytes"])
    return {
        "architecture": f"sm_{number}",
        "kernel": specialisation.kernel,
        "dtype": str(specialisation.dtype).removeprefix("torch."),
        "width": specialisation.width,
        **{name: int(getattr(specialisation, name)) for name in ("low_rank", "static", "tiled")},
        **blocks._asdict(),
        **found,
        "occupancy": f"{occupancy:.3f}",
        **provenance(),
    }


def main(argv: list[str] | None = None) -> None:
    """Compile, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "kernels.csv")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--quick", action="store_true", help="one of each kernel only, to show that everything works")
    arguments = parser.parse_args(argv)
    chosen = [each for each in Specialisation.all() if each.kernel in arguments.kernels]
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        chosen = list(
            {each.kernel: each for each in chosen if each.width == 64 and each.dtype == torch.bfloat16}.values()
        )
    rows = [line(*each) for each in tqdm(list(product(chosen, ARCHITECTURES)), unit="kernel")]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
