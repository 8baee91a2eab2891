"""The tables and the plot of the GLUE benchmark, from the files that benchmarks/glue/scores.py wrote.

    python -m benchmarks.report.glue          # writes scores.png beside the results, and the tables into the documents
    python -m benchmarks.report.glue --check  # only says whether documents and results agree

`<!-- table: glue (benchmarks/report/glue.py) -->` … `<!-- end of table -->` is where the table `glue` goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measurements.records import ROOT
from benchmarks.report.glue_plot import plot
from benchmarks.report.glue_tables import RESULTS, probes, read, starts, table
from benchmarks.report.table_places import parser_of, write_tables

DOCUMENTS = tuple(ROOT / name for name in ("docs/glue.md", "docs/sparse.md", "benchmarks/tried.md"))


def main(argv: list[str] | None = None) -> None:
    """Print the table, write tables and plot; or check them."""
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS)
    arguments = parser.parse_args(argv)
    results = read(arguments.results)
    if not results:
        sys.exit(f"There are no results in {arguments.results}: run benchmarks/glue/scores.py first.")
    makers = {"glue": lambda: table(results), "glue-starts": lambda: starts(results), "glue-probes": probes}
    write_tables(arguments.documents, "glue", makers, check=arguments.check)
    if not arguments.check:
        print(table(results))
        plot(results, arguments.results / "scores.png")


if __name__ == "__main__":
    main()
