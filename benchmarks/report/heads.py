"""Tables and plots of the benchmark of heads, from the files that benchmarks/heads/curve.py and benchmarks/block/attention.py wrote.

    python -m benchmarks.report.heads          # writes curve.png and kept.png beside the results, and the tables into the documents
    python -m benchmarks.report.heads --check  # only says whether documents and results agree

`<!-- table: heads-curve (benchmarks/report/heads.py) -->` … `<!-- end of table -->` is where the table `heads-curve` goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measurements.records import ROOT
from benchmarks.report.distance_tables import encoders
from benchmarks.report.heads_plot import plot, plot_kept
from benchmarks.report.heads_tables import KEPT, RESULTS, SPEED, bars, curve, missing, read, speed, stock, tasks
from benchmarks.report.table_places import parser_of, write_tables

DOCUMENTS = tuple(
    ROOT / name for name in ("README.md", "docs/performance.md", "benchmarks/heads/results.md", "benchmarks/tried.md")
)


def main(argv: list[str] | None = None) -> None:
    """Write tables and plots; or check the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--speed", type=Path, default=SPEED)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS)
    arguments = parser.parse_args(argv)
    results = read(arguments.results)
    if not results:
        sys.exit(f"There are no results in {arguments.results}: run benchmarks/heads/curve.py first.")
    makers = {
        "heads-curve": lambda: curve(results),
        "heads-kept": lambda: curve(results, KEPT),
        "heads-bars": lambda: bars(results),
        "heads-tasks": lambda: tasks(results),
        "heads-stock": lambda: stock(results),
        "heads-missing": lambda: missing(results),
        "heads-speed": lambda: speed(arguments.speed),
        "heads-by-distance": encoders,
    }
    write_tables(arguments.documents, "heads", makers, check=arguments.check)
    if not arguments.check:
        print(curve(results))
        plot(results, arguments.results / "curve.png")
        plot_kept(results, arguments.results / "kept.png")


if __name__ == "__main__":
    main()
