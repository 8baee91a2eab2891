"""What it costs to leave token comparison to a few heads: GLUE scores against the share of synthesized heads.

    python -m benchmarks.heads.curve --glue_dir ../shared/data/glue --list           # what there is, what is missing
    python -m benchmarks.heads.curve --glue_dir ../shared/data/glue --tasks mrpc     # run a part of it
    python -m benchmarks.heads.curve --glue_dir ../shared/data/glue --points closed  # the closed form alone, in minutes a task
    python -m benchmarks.heads.curve --glue_dir ../shared/data/glue                  # run the rest

A run is a task, a variant, heads or whole layers, a share and a seed; it writes one JSON file into benchmarks/results/heads,
and points that are there are not measured again. Each run has three points, and those of EPOCH_VARIANT a fourth:

- `closed`: the heads that `suggest_heads` finds cheapest on the stock model that was fine-tuned on the task, in closed form, no
  training;
- `transfer`: after a transfer on TRANSFER_ROWS rows, without labels;
- `finetuned`: and then fine-tuned on 1,024 rows of the task, at one rate;
- `epoch`: fine-tuned in its place on all training rows, once.

Share 0 is the baseline: the same fine-tuned stock model, fine-tuned once more, on the same rows in the same order at the same rate. `by`
"layers" swaps whole layers at the same share (of six: 2, 3 and 5), those whose heads cost least together.

It is made to be cheap, so that one core finishes the curve of one seed in two hours: a head's closed form comes from the teacher alone,
whatever else is synthesized, and so is computed once for a task, a variant and a seed, and taken by all shares; and rows of transfer and
fine-tuning are few, a fraction of what benchmarks/glue/scores.py takes, so that `transfer` and `finetuned` say what half a minute wins back, and
`epoch` what one more epoch does. Everything else (the teachers, rows, batches, the clock) is that of benchmarks/glue/scores.py; speed is measured by
benchmarks/block/attention.py, which knows `random [90% of heads]`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from benchmarks.glue import scores as glue
from benchmarks.heads.closed_forms import MEASURED, Whole, cache_share, take_heads
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import processor, quick_output
from benchmarks.measurements.run_files import missing, parser_of, write
from examples.shared.loop import GroupedBatches, finetune, unlabelled
from hf_synthesizer import patch_model, transfer_attention
from hf_synthesizer.transfer.variation import special_ids, vary

RESULTS = ALL_RESULTS / "heads"

SHARES = (0, 25, 50, 75, 90, 95, 100)
VARIANTS = ("random", "random+salience", "dense+salience")
BY = ("heads", "layers")
POINTS = ("closed", "transfer", "finetuned", "epoch")
LAYER_SHARES = (25, 50, 75)
"""Of whole layers. Of six layers, 90 % are all."""
SEED_TASKS = ("cola", "stsb", "mrpc", "rte")
SEED_SHARES = (0, 50, 75, 90, 95)
SEED_VARIANT = "random+salience"
"""What is run with three seeds: the shares that something was asked of, where a seed moves the score."""
EPOCH_VARIANT, EPOCH_SHARES = SEED_VARIANT, (*SEED_SHARES, 100)
"""What is also fine-tuned on all rows."""
AVERAGED = 1_024
"""Training rows that closed forms are made of."""
TRANSFER_ROWS = 512
"""Of the transfer, most of them made up from the training rows."""
TRANSFER_RATES = {"learning_rate": 1e-3, "backbone_learning_rate": 1e-4}
"""A fifth and a third of the library's, which are for ten times as many steps: heads start near, and in forty steps those led further
away from the teacher's hidden states."""
FINETUNED_ON = {"finetuned": 1_024, "epoch": None}
"""Training rows: the first so many, or all."""
FINETUNING = {"epochs": 1, "learning_rate": 5e-5}
"""Of converted models and of the baseline alike. One rate, so that no point is the better of two on the rows it is scored on."""


@dataclass(frozen=True)
class Run:
    """One file of the glue."""

    task: str
    variant: str
    by: str
    share: int
    seed: int

    @property
    def name(self) -> str:
        if self.share == 0:
            return f"{self.task}-stock-seed{self.seed}"
        return f"{self.task}-{self.variant}-{self.share}-{self.by}-seed{self.seed}"

    @property
    def closed_forms(self) -> str:
        """What all shares have in common."""
        return f"{self.task}-{self.variant}-seed{self.seed}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def read(self, folder: Path) -> dict[str, Any]:
        return json.loads(self.path(folder).read_text()) if self.path(folder).exists() else {}

    def missing(self, points: list[str], folder: Path) -> list[str]:
        """The points that are wanted and not there; the baseline has no transfer."""
        there = {*self.read(folder).get("points", {}), *(["transfer"] if self.share == 0 else [])}
        epoch = self.share == 0 or (
            self.variant == EPOCH_VARIANT and self.by == "heads" and self.share in EPOCH_SHARES
        )
        return [point for point in points if point not in there and (epoch or point != "epoch")]


def all_runs() -> list[Run]:
    """Everything that the curve needs; the baseline of a task and a seed comes before what is compared with it."""
    runs = []
    for seed, task in itertools.product(range(3), glue.TASKS):
        if seed and task not in SEED_TASKS:
            continue
        runs.append(Run(task, "stock", "heads", 0, seed))
        shares = [share for share in (SEED_SHARES if seed else SHARES) if share]
        variants = (SEED_VARIANT,) if seed else VARIANTS
        runs += [Run(task, variant, "heads", share, seed) for variant in variants for share in shares]
        if not seed:
            runs += [Run(task, "random+salience", "layers", share, seed) for share in LAYER_SHARES]
    return runs


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(
        __doc__, "mrpc-random-90-heads-seed0", glue.TASKS, "outputs/benchmark", "teachers and closed forms"
    )
    parser.add_argument("--glue_dir", help="TASK/train.jsonl and so on")
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--variants", nargs="*", choices=("stock", *VARIANTS), help="these variants alone")
    parser.add_argument("--by", nargs="*", choices=BY, help="heads or whole layers alone")
    parser.add_argument("--shares", nargs="*", type=int, choices=SHARES, help="these shares alone, in percent")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--points", nargs="*", choices=POINTS, default=list(POINTS), help="these points alone")
    parser.add_argument("--quick", action="store_true", help="few rows and steps, to show that everything works")
    return glue.apart_if_quick(parser.parse_args(argv))


def results_of(arguments: argparse.Namespace) -> Path:
    """The folder of the results; a quick run has one of its own."""
    return quick_output(RESULTS) if arguments.quick else RESULTS


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    folder = results_of(arguments)
    to_do = missing(all_runs(), lambda run: run.missing(arguments.points, folder), arguments)
    if not to_do:
        return
    bench = Bench(arguments)
    for number, run in enumerate(to_do, 1):
        print(f"\n[{number}/{len(to_do)}] {run.name}", flush=True)
        for point in run.missing(arguments.points, folder):
            result = bench.measure(run, point)
            write(run.path(folder), result)
            found = result["points"][point]
            print(f"{run.name} {point}: {found['score']:.4f} ({found['seconds']:.0f} s)", flush=True)


class Bench(glue.Bench):
    """The setting of benchmarks/glue/scores.py, with a plan for each share; what several runs share is made once."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(arguments)
        self.whole: dict[str, Whole] = {}
        self.taught: dict[Run, PreTrainedModel] = {}

    def stock_teacher(self, run: Run) -> PreTrainedModel:
        """Stock, fine-tuned on the run's task with the run's seed."""
        return self.teacher(glue.Run(run.task, "stock", False, run.seed))

    def batches(self, rows: Any, seed: int, size: int | None = None) -> Any:
        return GroupedBatches(rows, size or glue.BATCH_SIZE, self.collate, seed=seed)

    def all_heads(self, run: Run, teacher: PreTrainedModel) -> Whole:
        """The teacher with all heads in closed form, and what each of them costs: for all shares of a task, variant and seed."""
        key = run.closed_forms
        path = Path(self.arguments.work_dir) / "closed_forms" / f"{key}.pt"
        if key not in self.whole:
            set_seed(run.seed)
            if path.exists():
                self.whole = {key: Whole.load(path, teacher, run.variant)}
            else:
                self.whole = {key: Whole.of(teacher, run.variant, self.unlabelled(run, AVERAGED))}
                self.whole[key].save(path)
                print(self.whole[key].suggestion, flush=True)
        return self.whole[key]

    def unlabelled(self, run: Run, number: int) -> Any:
        """The first training rows, without labels, in batches that have an order of their own each time."""
        return self.batches(unlabelled(self.rows(run.task)["train"][:number]), run.seed)

    def plan(self, run: Run, teacher: PreTrainedModel) -> dict[Any, Any]:
        """What `patch_model` gets: the cheapest heads, or the layers whose heads cost least together."""
        suggestion = self.all_heads(run, teacher).suggestion
        if run.by == "heads":
            return suggestion.at(run.share / 100)
        order = sorted(suggestion.costs, key=lambda layer: sum(suggestion.costs[layer]))
        return dict.fromkeys(order[: math.ceil(run.share * len(order) / 100)], suggestion.variant)

    def converted(self, run: Run, teacher: PreTrainedModel) -> PreTrainedModel:
        """The patched copy of the teacher in closed form."""
        set_seed(run.seed)
        model = copy.deepcopy(teacher)
        model.set_attn_implementation("sdpa")
        patch_model(model, self.plan(run, teacher), max_length=glue.MAX_LENGTH)
        take_heads(model, self.all_heads(run, teacher).model)
        return model

    def transferred(self, run: Run, teacher: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The same after the transfer."""
        model = self.converted(run, teacher)
        texts = vary(
            unlabelled(self.rows(run.task)["train"]),
            min(TRANSFER_ROWS, len(self.rows(run.task)["train"])),
            special_ids(self.tokenizer),
            max_length=glue.MAX_LENGTH,
            seed=run.seed,
        )
        batches = self.batches(texts, run.seed, glue.TRANSFER_BATCH_SIZE)
        number = len(batches)
        report = transfer_attention(
            model,
            teacher,
            batches,
            steps=(int(glue.FIRST_STAGE * number), number),
            average_batches=0,  # the closed form is there
            **TRANSFER_RATES,
            autocast=torch.bfloat16,
        )
        return model, {
            "transfer_rows": len(texts),
            "transfer_steps": report.steps,
            "error": report.error_after,
            **TRANSFER_RATES,
        }

    def measure(self, run: Run, point: str) -> dict[str, Any]:  # type: ignore[override]
        """One point more of a run."""
        teacher, started = self.stock_teacher(run), time.process_time()
        result = run.read(results_of(self.arguments)) or {**asdict(run), **self.setting(run, teacher), "points": {}}
        model, facts = teacher, {}
        if run.share and point == "closed":
            model = self.converted(run, teacher)
        elif run.share:
            if run not in self.taught:
                taught, facts = self.transferred(run, teacher)
                self.taught = {run: taught}
            model = self.taught[run]
        if point in FINETUNED_ON:
            model = copy.deepcopy(model)
            set_seed(run.seed)
            rows = self.rows(run.task)["train"][: FINETUNED_ON[point]]
            finetune(model, self.batches(rows, run.seed), **FINETUNING, description=run.name)
            facts = {"finetuned_rows": len(rows), **FINETUNING}
        value, metrics = self.score(model, run)
        seconds = time.process_time() - started
        result["points"][point] = {"score": value, "metrics": metrics, "seconds": seconds, **facts}
        return result

    def setting(self, run: Run, teacher: PreTrainedModel) -> dict[str, Any]:
        """What is the same for all points of a run."""
        plan = self.plan(run, teacher) if run.share else {}
        named = {key: getattr(value, "heads", None) for key, value in plan.items()}
        return {
            "layers": {str(key): None if heads is None else list(heads) for key, heads in named.items()},
            "model": Path(self.model).parent.name if self.arguments.model is None else self.model,
            "train_rows": len(self.rows(run.task)["train"]),
            "teacher_epochs": glue.EPOCHS[run.task],
            "averaged_rows": AVERAGED,
            "measured_rows": MEASURED,
            "cache_share": cache_share(plan, teacher) if run.share else 1.0,
            "threads": torch.get_num_threads(),
            "machine": f"{processor()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "hf_synthesizer")},
            },
            "commit": self.commit,
        }


if __name__ == "__main__":
    main()
