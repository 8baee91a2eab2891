"""Whether an encoder's tables need their places: `random+salience` beside `relative+salience`, in closed form, and two controls.

    python -m benchmarks.heads.by_distance --glue_dir ../shared/data/glue --list
    python -m benchmarks.heads.by_distance --glue_dir ../shared/data/glue  # run what is missing
    python -m benchmarks.report.heads  # the table

A run is a task, what the chosen heads become, a share, a seed, and the rows that it is taught on: all, or those of at most 64 tokens. The
teachers are those of benchmarks/glue/scores.py. Each variant takes the heads that `suggest_heads` finds cheapest for it, in closed form.
Controls take the heads of `relative+salience`: `own_token` lets them look at their own token alone, and `zeroed` takes them out.

`score` is on all rows of the validation set, `score_long` on those of more than 64 tokens, if there are at least 50.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from benchmarks.glue import scores as glue
from benchmarks.heads import curve
from benchmarks.heads.closed_forms import zero_heads
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import quick_output
from benchmarks.measurements.run_files import file_of, measured_on, missing, parser_of, write
from examples.shared.loop import score, unlabelled
from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.glue.tasks import get_task

RESULTS = ALL_RESULTS / "by_distance"
PLACES, DISTANCES = "random+salience", "relative+salience"
CONTROLS = ("own_token", "zeroed")
SHARES = (50, 90)
SHORT = 64
"""Tokens of a short row."""
FEWEST = 50
"""Longer rows of a task that can be judged."""


@dataclass(frozen=True)
class Run(curve.Run):
    """One file."""

    short: bool = False
    """Whether rows of at most SHORT tokens teach."""

    @property
    def name(self) -> str:
        return f"{super().name}{'-short' if self.short else ''}"

    @property
    def closed_forms(self) -> str:
        return f"{super().closed_forms}{'-short' if self.short else ''}"


def all_runs() -> list[Run]:
    """Stock first, then both variants for each share and both kinds of rows, and the controls."""
    runs = []
    for seed, task in itertools.product(range(3), glue.TASKS):
        if seed and task not in curve.SEED_TASKS:
            continue
        runs.append(Run(task, "stock", "heads", 0, seed))
        for share, variant in itertools.product(SHARES, (PLACES, DISTANCES)):
            runs += [Run(task, variant, "heads", share, seed, short) for short in (False, True)]
        runs += [Run(task, control, "heads", share, seed) for share in SHARES for control in CONTROLS]
    return runs


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    parser = parser_of(
        __doc__, "mrpc-relative+salience-90-heads-seed0", glue.TASKS, "outputs/benchmark", "teachers and closed forms"
    )
    parser.add_argument("--glue_dir", help="TASK/train.jsonl and so on")
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--quick", action="store_true", help="few rows, to show that everything works")
    arguments = glue.apart_if_quick(parser.parse_args(argv))
    folder = quick_output(RESULTS) if arguments.quick else RESULTS
    to_do = missing(all_runs(), lambda run: file_of(run.path(folder)), arguments)
    if not to_do:
        return
    where, bench = measured_on(), Bench(arguments)
    for number, run in enumerate(to_do, 1):
        result = {**bench.measure_distances(run), **where}
        write(run.path(folder), result)
        print(f"[{number}/{len(to_do)}] {run.name}: {result['score']:.4f}, {result['score_long']}", flush=True)


class Bench(curve.Bench):
    """The setting of the curve of heads, with rows of two kinds."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(arguments)
        self.stock: dict[tuple[str, int], PreTrainedModel] = {}

    def unlabelled(self, run: curve.Run, number: int) -> Any:
        rows = self.rows(run.task)["train"]
        if isinstance(run, Run) and run.short:
            rows = [row for row in rows if len(row["input_ids"]) <= SHORT]
        return self.batches(unlabelled(rows[:number]), run.seed)

    def model_of(self, run: Run) -> PreTrainedModel:
        """Stock, the converted model, or a control."""
        place = (run.task, run.seed)
        if place not in self.stock:
            self.stock = {place: self.stock_teacher(run)}
        teacher = self.stock[place]
        if not run.share:
            return teacher
        if run.variant not in CONTROLS:
            return self.converted(run, teacher)
        plan = self.plan(replace(run, variant=DISTANCES), teacher)
        model = copy.deepcopy(teacher)
        if run.variant == "zeroed":
            for layer, config in plan.items():
                projection = model.base_model.encoder.layer[int(layer)].attention.output.dense
                count = model.config.num_attention_heads
                zero_heads(projection, count, list(range(count) if config.heads is None else config.heads))
            return model
        own = {layer: SynthesizerConfig("dot_product", heads=plan[layer].heads, window=1, sinks=0) for layer in plan}
        model.set_attn_implementation("sdpa")
        return patch_model(model, own)

    def measure_distances(self, run: Run) -> dict[str, Any]:
        """The scores of a run."""
        started = time.process_time()
        model = self.model_of(run).eval()
        rows = self.rows(run.task)["validation"]
        long = [row for row in rows if len(row["input_ids"]) > SHORT]
        value, metrics = score(model, get_task(run.task), rows, self.collate)
        enough = len(long) >= FEWEST
        return {
            **asdict(run),
            "score": value,
            "metrics": metrics,
            "score_long": score(model, get_task(run.task), long, self.collate)[0] if enough else None,
            "rows": len(rows),
            "rows_long": len(long),
            "taught_rows": curve.AVERAGED,
            "seconds": time.process_time() - started,
        }


if __name__ == "__main__":
    main()
