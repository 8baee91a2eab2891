"""Writes the tables of the documents from benchmarks/results, between pairs of comments.

    python -m benchmarks.report.tables          # writes them
    python -m benchmarks.report.tables --check  # only says whether documents and results agree

`<!-- table: speed (benchmarks/report/tables.py) -->` … `<!-- end of table -->` is where the table `speed` goes.
"""

from __future__ import annotations

from benchmarks.measurements.records import ROOT
from benchmarks.report import (
    block_bars,
    block_tables,
    covered_lines,
    long_tables,
    model_tables,
    model_type_tables,
    real_weights_tables,
    sparse_tables,
)
from benchmarks.report.table_places import parser_of, write_tables
from benchmarks.report.table_text import markdown

DOCUMENTS = (
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / name for name in ("models.md", "performance.md", "real_weights.md", "sparse.md")),
    *(ROOT / "benchmarks" / name for name in ("block/results.md", "model/results.md", "tried.md")),
)


def served() -> str:
    """Which model types each layer class serves."""
    return markdown(*model_type_tables.served())


def refused() -> str:
    """Which model types are refused, and why."""
    return markdown(*model_type_tables.not_served("refused"))


def unbuilt() -> str:
    """Of which model types no tiny model was made, so that nothing was checked."""
    return markdown(*model_type_tables.not_served("not built"))


def covered() -> str:
    """How much of the package the tests run."""
    return markdown(*covered_lines.table()) if covered_lines.FILE.exists() else "Not measured yet: `make coverage`."


TABLES = {
    made.__name__: made
    for made in (
        block_tables.variants,
        block_tables.speed,
        block_tables.account,
        block_bars.bars,
        block_tables.held_down,
        block_tables.slowest,
        long_tables.long_sequences,
        long_tables.long_bars,
        model_tables.startup,
        block_tables.milliseconds,
        block_tables.lengths,
        block_tables.dropout,
        block_tables.bfloat16,
        block_tables.before_after,
        model_tables.memory,
        model_tables.compression,
        model_tables.models,
        model_tables.choosing,
        model_tables.decode,
        model_tables.cache_growth,
        model_tables.explore,
        sparse_tables.starts,
        sparse_tables.recall,
        sparse_tables.growth,
        sparse_tables.flex,
        model_tables.layers,
        real_weights_tables.real_equal,
        real_weights_tables.real_weights,
        served,
        refused,
        unbuilt,
        covered,
    )
}


def main(argv: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    arguments = parser_of(__doc__).parse_args(argv)
    write_tables(DOCUMENTS, "tables", TABLES, check=arguments.check)


if __name__ == "__main__":
    main()
