"""Times one attention block before and after a change: this checkout against another one, in one alternating run.

    git worktree add --detach ../before 774fba4
    python -m benchmarks.block.before_after ../before  # all cells that are missing in before_after.csv
    python -m benchmarks.block.before_after ../before --lengths 512 --variants dense,random+salience
    python -m benchmarks.block.before_after . --quick  # two cells of a checkout against itself

Each checkout has a process of its own, with its own library and its own blocks of `blocks.py`; they take turns, one after the
other, and the order changes each round. `speedup` is the median before by the median after: below 1 the change made it slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measurements.records import RESULTS, ROOT, Results, commit, quick_output, threads

VARIANTS = (
    "random",
    "factorized_random",
    "random+salience",
    "dense",
    "factorized_dense",
    "dense+salience",
    "random+dot_product",
    "sparse_strided",
)
CELLS = (
    ("inference", "none", "float32", 0.0),
    ("inference", "ragged", "float32", 0.0),
    ("inference", "none", "bfloat16", 0.0),
    ("train", "none", "float32", 0.0),
    ("train", "none", "float32", 0.1),
)
RUNS = 4
"""At a turn, after one that is not counted: the threads of the other process go on spinning for a while."""
FIELDS = ("status", "before_commit", "median_ms", "before_ms", "speedup", "rounds")
PROCESS = Path(__file__).with_name("before_after_process.py")


def process_of(root: Path) -> subprocess.Popen[str]:
    """A process that runs the library and the blocks of a checkout, and nothing of another one."""
    places = [root] if (root / "benchmarks" / "__init__.py").exists() else [root, root / "benchmarks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-P", str(PROCESS), str(root), str(RUNS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def measure(before: Path, arguments: argparse.Namespace) -> None:
    """Every cell that the file lacks."""
    results = Results(arguments.output, FIELDS)
    servers = {"before": process_of(before.resolve()), "after": process_of(ROOT)}

    def time_cell(name: str, cell: dict[str, Any]) -> list[float]:
        server = servers[name]
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(cell) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    earlier = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=before, capture_output=True, text=True)
    for (mode, padding, dtype, dropout), length, variant in itertools.product(
        CELLS[:1] if arguments.quick else CELLS, arguments.lengths, arguments.variants
    ):
        cell = {"variant": variant, "mode": mode, "padding": padding, "dtype": dtype, "dropout": dropout}
        cell |= {"length": length, "batch_size": arguments.batch_size}
        row = {"benchmark": "before_after", "model": "block", "threads": threads()}
        row |= {name: str(value) for name, value in cell.items()}
        if results.has(row):
            continue
        times: dict[str, list[float]] = {"before": [], "after": []}
        for number in range(arguments.rounds + 1):
            for name in sorted(times, reverse=number % 2 == 1):
                times[name] += time_cell(name, cell)
        medians = {name: statistics.median(found[RUNS:]) * 1e3 for name, found in times.items()}
        made = {"status": "ok", "before_commit": earlier.stdout.strip(), "rounds": str(arguments.rounds)}
        made |= {"median_ms": f"{medians['after']:.3f}", "before_ms": f"{medians['before']:.3f}"}
        made["speedup"] = f"{medians['before'] / medians['after']:.3f}"
        results.add({**row, **made})
        sys.stderr.write(f"{made['speedup']} {variant} {mode} {padding} {dtype} dropout {dropout} {length}\n")
    for server in servers.values():
        server.terminate()
        server.wait()
    print(f"commit {commit()} against {earlier.stdout.strip()}: {arguments.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[128, 512])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULTS / "before_after.csv")
    parser.add_argument("--quick", action="store_true", help="two cells of a tiny length")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        arguments.variants, arguments.lengths, arguments.batch_size, arguments.rounds = ["random", "dense"], [16], 1, 1
    measure(arguments.before, arguments)


if __name__ == "__main__":
    main()
