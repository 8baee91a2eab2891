"""Times one attention block before and after a change: this checkout against another one, in one alternating run.

    git worktree add --detach ../before 774fba4
    python -m benchmarks.block.before_after ../before  # all cells that are missing in before_after.csv
    python -m benchmarks.block.before_after ../before --lengths 512 --variants dense,random+salience
    python -m benchmarks.block.before_after . --quick  # two cells of a checkout against itself

Each checkout has a process of its own, with its own library and its own blocks of `blocks.py`; they take turns, one after the
other, and the order changes each time. Two processes of the same checkout can differ by a tenth in a cell, as memory falls. So all
processes start anew `--restarts` times, and a time is the median over them. `speedup` is the time before by the time after: below 1 the
change made it slower. `same_again` is the same of a second process of the checkout before: how far chance goes.
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

from benchmarks.measurements.records import RESULTS, ROOT, Results, Row, commit, quick_output, threads

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
"""At a turn, after one that is not counted: the threads of the other processes go on spinning for a while."""
FIELDS = ("status", "before_commit", "median_ms", "before_ms", "speedup", "same_again", "restarts")
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
    earlier = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=before, capture_output=True, text=True)
    rows: list[Row] = []
    for (mode, padding, dtype, dropout), length, variant in itertools.product(
        CELLS[:1] if arguments.quick else CELLS, arguments.lengths, arguments.variants
    ):
        cell = {"variant": variant, "mode": mode, "padding": padding, "dtype": dtype, "dropout": str(dropout)}
        cell |= {"length": str(length), "batch_size": str(arguments.batch_size)}
        row = {"benchmark": "before_after", "model": "block", "threads": threads(), **cell}
        if not results.has(row):
            rows.append(row)
    roots = {"before": before, "after": ROOT, "again": before}
    medians: list[dict[str, list[float]]] = [{name: [] for name in roots} for _ in rows]
    for number in range(arguments.restarts if rows else 0):
        servers = {name: process_of(root.resolve()) for name, root in roots.items()}
        order = list(roots)[number % 3 :] + list(roots)[: number % 3]
        for row, found in zip(rows, medians, strict=True):
            for name in order:
                found[name].append(statistics.median(time_cell(servers[name], row)))
        for server in servers.values():
            server.terminate()
            server.wait()
        sys.stderr.write(f"restart {number + 1} of {arguments.restarts}\n")
    for row, found in zip(rows, medians, strict=True):
        times = {name: statistics.median(values) * 1e3 for name, values in found.items()}
        made = {"status": "ok", "before_commit": earlier.stdout.strip(), "restarts": str(arguments.restarts)}
        made |= {"median_ms": f"{times['after']:.3f}", "before_ms": f"{times['before']:.3f}"}
        made["speedup"] = f"{times['before'] / times['after']:.3f}"
        made["same_again"] = f"{times['before'] / times['again']:.3f}"
        results.add({**row, **made})
    print(f"commit {commit()} against {earlier.stdout.strip()}: {arguments.output}")


def time_cell(server: subprocess.Popen[str], row: Row) -> list[float]:
    """The times of a turn, in seconds."""
    cell: dict[str, Any] = {name: row[name] for name in ("variant", "mode", "padding", "dtype")}
    cell |= {"dropout": float(row["dropout"]), "length": int(row["length"]), "batch_size": int(row["batch_size"])}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(cell) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[128, 512])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "before_after.csv")
    parser.add_argument("--quick", action="store_true", help="two cells of a tiny length")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        arguments.variants, arguments.lengths = ["random", "dense"], [16]
        arguments.batch_size = arguments.restarts = 1
    measure(arguments.before, arguments)


if __name__ == "__main__":
    main()
