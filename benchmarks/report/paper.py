"""The tables and plots of the paper's tasks and of pretrained models, from the files that benchmarks/paper/scores.py and benchmarks/pretrained/scores.py wrote.

    python -m benchmarks.report.paper          # writes the tables into the documents, and draws the plots
    python -m benchmarks.report.paper --check  # only says whether documents and results agree

`<!-- table: paper-clm (benchmarks/report/paper.py) -->` … `<!-- end of table -->` is where the table `paper-clm` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.measurements.records import RESULTS, ROOT
from benchmarks.report import pretrained_tables
from benchmarks.report.distance_tables import decoders
from benchmarks.report.literature import LITERATURE
from benchmarks.report.paper_plots import plot_kept, plot_orders
from benchmarks.report.paper_tables import SCORES, of_variants, read, table
from benchmarks.report.pretrained_tables import POINTS, PRETRAINED, TITLES, of_task
from benchmarks.report.table_places import parser_of, write_tables
from hf_synthesizer.plots import save

DOCUMENTS = tuple(ROOT / "benchmarks" / name / "results.md" for name in ("paper", "pretrained"))


def makers_of(folder: Path) -> dict[str, Callable[[], str]]:
    """What makes each table, from a folder of results."""
    paper, kept = read(folder / "paper"), read(folder / "pretrained")
    makers: dict[str, Callable[[], str]] = {f"paper-{task}": lambda task=task: table(paper, task) for task in SCORES}
    makers["pretrained-plans"] = decoders
    return makers | {
        f"pretrained-{task}": lambda task=task: pretrained_tables.table(kept, task) for task in PRETRAINED
    }


def draw(folder: Path) -> None:
    """A plot for each table that has results, beside them."""
    paper, kept = read(folder / "paper"), read(folder / "pretrained")
    for task, (name, _) in SCORES.items():
        runs = of_variants(paper, task)
        if runs:
            known = LITERATURE[task]
            scores = {variant: [row["score"] for row in rows] for variant, rows in runs.items()}
            save(plot_orders(scores, name, known.figures, known.what), folder / "paper" / f"{task}.png", dpi=90)
    if kept:
        panels = {task: of_task(kept, task) for task in TITLES if of_task(kept, task)}
        labels = {task: PRETRAINED[task][0] for task in panels}
        save(
            plot_kept(panels, TITLES, labels, {point: said for point, said in POINTS.items() if point != "distance"}),
            folder / "pretrained" / "kept.png",
            dpi=90,
        )


def main(argv: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS)
    arguments = parser.parse_args(argv)
    write_tables(arguments.documents, "paper", makers_of(arguments.results), check=arguments.check)
    if not arguments.check:
        draw(arguments.results)


if __name__ == "__main__":
    main()
