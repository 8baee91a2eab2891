"""Writes which share of the package's lines the tests run, by room, from what coverage.py has measured: `make coverage`.

python -m pytest --cov --cov-report=          # writes .coverage
python -m benchmarks.report.covered_lines  # writes results/covered_lines.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.measurements.records import RESULTS, ROOT, Row, provenance, read

PACKAGE = "hf_synthesizer"
TOTAL = "all"
FILE = RESULTS / "covered_lines.csv"


def rooms(report: dict) -> dict[str, tuple[int, int]]:
    """Statements and covered ones, by folder of the package, of a report in coverage.py's JSON."""
    counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in report["files"].items():
        inside = Path(name).relative_to(PACKAGE)
        room = inside.parent.as_posix() if len(inside.parts) > 1 else "."
        for key in (room, TOTAL):
            counted[key][0] += file["summary"]["num_statements"]
            counted[key][1] += file["summary"]["covered_lines"]
    return {room: (statements, covered) for room, (statements, covered) in sorted(counted.items())}


def table() -> tuple[list[str], list[list[str]]]:
    """What the documents say of the file: a line for each room, all of them last."""
    rows: list[Row] = sorted(read(FILE), key=lambda row: (row["room"] == TOTAL, row["room"]))
    return ["room", "statements", "run by tests, %"], [[row["room"], row["statements"], row["share"]] for row in rows]


def main(argv: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage", help="what coverage.py wrote")
    parser.add_argument("--output", type=Path, default=FILE)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        command = [
            sys.executable,
            "-m",
            "coverage",
            "json",
            "--quiet",
            f"--data-file={arguments.data}",
            "-o",
            str(path),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        counted = rooms(json.loads(path.read_text(encoding="utf-8")))
    said = {
        name: value
        for name, value in provenance().items()
        if name in ("python", "torch", "transformers", "commit", "date")
    }
    with arguments.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["room", "statements", "covered", "share", *said], lineterminator="\n")
        writer.writeheader()
        for room, (statements, covered) in counted.items():
            share = f"{100 * covered / max(statements, 1):.1f}"
            writer.writerow({"room": room, "statements": statements, "covered": covered, "share": share, **said})


if __name__ == "__main__":
    main()
