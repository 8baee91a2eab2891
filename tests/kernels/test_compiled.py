"""Every kernel that the library can launch, compiled for GPUs that are not there: `make test-kernels`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_synthesizer.attend.triton.blocks import KERNELS, Specialisation
from tests.helpers.benchmark_runs import BENCHMARKS, lines, run

pytestmark = pytest.mark.kernels

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10}
SMALLEST = 99 << 10
"""The shared memory of a program on the GPUs of these generations that are made for desks."""
NAMES = ("architecture", "kernel", "dtype", "width", "low_rank", "static", "tiled")


def compiled(output: Path, *options: str) -> list[dict[str, str]]:
    """What the script says, run in a process of its own: in this one the kernels are interpreted."""
    environment = {"TRITON_CACHE_DIR": str(output.parent / "cache"), "TRITON_INTERPRET": None}
    done = run("scaling.kernel_resources", "--output", output, *options, **environment)
    assert done.returncode == 0, done.stderr
    return lines(output)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_specialisation_compiles_within_the_limits_of_its_gpu(kernel: str, tmp_path: Path) -> None:
    rows = compiled(tmp_path / "kernels.csv", "--kernels", kernel)
    assert len(rows) == 2 * sum(each.kernel == kernel for each in Specialisation.all())
    for row in rows:
        assert int(row["spilled_bytes"]) == 0, row
        assert int(row["shared_bytes"]) <= min(SHARED[row["architecture"]], SMALLEST), row
        assert float(row["occupancy"]) > 0, row
    named = {tuple(row[name] for name in NAMES): row for row in lines(BENCHMARKS / "results" / "kernels.csv")}
    for row in rows:
        recorded = named[tuple(row[name] for name in NAMES)]
        if recorded["triton"] != row["triton"]:
            continue  # another compiler takes other numbers of registers; the limits above are for all
        for column in ("rows", "keys", "warps", "stages", "registers", "shared_bytes", "occupancy"):
            assert recorded[column] == row[column], (
                f"{column} of {row}: run python -m benchmarks.scaling.kernel_resources"
            )


def test_a_quick_run_compiles_one_of_each_kernel(tmp_path: Path) -> None:
    rows = compiled(tmp_path / "kernels.csv", "--quick")
    assert sorted(row["kernel"] for row in rows) == sorted([*KERNELS, *KERNELS])
    assert {row["architecture"] for row in rows} == set(SHARED)
