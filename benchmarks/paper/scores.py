"""The paper's comparison at the size that one core carries: every variant on the same task, budget and seed.

    python -m benchmarks.paper.scores --list                             # what there is, what is missing
    python -m benchmarks.paper.scores --tasks clm --seeds 0 --threads 1  # run a part of it
    python -m benchmarks.paper.scores --weights WEIGHTS                  # run the rest
    python -m benchmarks.report.paper                                    # tables

A run is a task, a variant and a seed; it writes one JSON file into benchmarks/results/paper, and one that is there is skipped.
All variants of a task see the same rows in the same order for as many epochs, at the same rate, which was
chosen with stock attention. Only self-attention is swapped. Data is looked for in --data (`mt/`, `lm/`, `summ/`). Seconds are processor time.
`tasks.py` has the models, which are small and see little text: what can be compared is the order of variants within a table.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed

from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import ROOT
from benchmarks.measurements.run_files import file_of, measured_on, missing, parser_of, write
from benchmarks.paper.task import STOCK, Task
from benchmarks.paper.tasks import TASKS
from examples.shared.loop import finetune

RESULTS = ALL_RESULTS / "paper"
VARIANTS = (
    STOCK,
    "random",
    "fixed_random",
    "factorized_random",
    "dense",
    "factorized_dense",
    "random+dense",
    "dense+dot_product",
    "random+dot_product",
    "random+salience",
    "dense+salience",
)
IN_LITERATURE = (STOCK, "random", "dense", "random+dot_product")
LONG = {
    "clm_long": (*IN_LITERATURE, "factorized_random", "dense+dot_product"),
    "mlm_long": (*IN_LITERATURE, "factorized_random", "dense+dot_product"),
    "translation_long": (*IN_LITERATURE, "fixed_random", "random+dense"),
}
"""What is trained six to eight times as long: the variants that the literature has a figure of."""
SEEDS = {"mlm": (0,), "mlm_long": (0,), "summarization": (0,), "clm_long": (0, 1), "translation_long": (0, 1)}
"""Of the tasks that have fewer than three."""


@dataclass(frozen=True)
class Run:
    """One line of the benchmark."""

    task: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-seed{self.seed}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


def all_runs() -> list[Run]:
    """Everything that the tables need, the first seed of every task first."""
    every = [
        Run(task, variant, seed)
        for task in TASKS
        for seed in SEEDS.get(task, (0, 1, 2))
        for variant in LONG.get(task, VARIANTS)
    ]
    return sorted(every, key=lambda run: run.seed)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, "clm-dense-seed0", TASKS, "outputs/paper", "vocabularies")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="a folder with mt, lm and summ"
    )
    parser.add_argument(
        "--weights", type=Path, help="the folder that benchmarks/pretrained/fetch_weights.py filled; summaries need it"
    )
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="these variants alone")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rows, to try it; kept in --work_dir")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    folder = arguments.work_dir / "quick" / "results" if arguments.quick else RESULTS
    to_do = missing(all_runs(), lambda run: file_of(run.path(folder)), arguments)
    where = measured_on()
    for name, group in itertools.groupby(to_do, key=lambda run: run.task):
        task = TASKS[name](arguments.data, arguments.work_dir, arguments.weights, arguments.quick)
        for run in group:
            if run.path(folder).exists():  # another process was here first
                continue
            print(f"\n{run.name}", flush=True)
            result = {**measure(task, run), **where}
            write(run.path(folder), result)
            print(f"{run.name}: {task.score} {result['score']:.3f} ({result['train_seconds']:.0f} s)", flush=True)


def measure(task: Task, run: Run) -> dict[str, Any]:
    """Train from the task's start, and judge."""
    size = task.size
    set_seed(run.seed)
    model, facts = task.start(run.variant)
    set_seed(run.seed)
    batches = task.batches(run.seed)
    started = time.process_time()
    finetune(model, batches, epochs=size.epochs, learning_rate=size.learning_rate, description=run.name)
    seconds = time.process_time() - started
    started = time.process_time()
    metrics = task.judge(model)
    return {
        **asdict(run),
        "score": metrics[task.score],
        "score_name": task.score,
        "metrics": metrics,
        **facts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_rows": len(task.rows),
        "train_steps": size.epochs * len(batches),
        "train_seconds": seconds,
        "judge_seconds": time.process_time() - started,
        "size": asdict(size),
    }


if __name__ == "__main__":
    main()
