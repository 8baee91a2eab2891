"""What a pretrained model keeps when a part of its attention is synthesized: a decoder, and an encoder-decoder on two tasks.

    python -m benchmarks.pretrained.fetch_weights WEIGHTS --models smollm2 flan-t5-small
    python -m benchmarks.pretrained.scores --weights WEIGHTS --list
    python -m benchmarks.pretrained.scores --weights WEIGHTS --tasks smollm2 --threads 1
    python -m benchmarks.report.paper  # the tables

A quarter or half of the heads are synthesized, those that `suggest_heads` finds cheapest, or as many whole layers, those whose heads
cost least together. Three points: fresh logits; the closed form, of what has one; and a short transfer from there.
For tables of a decoder a fourth: the closed form with one weight a distance, and the first token apart. A run is a task, a
variant, heads or layers, and a share; it writes one JSON file into benchmarks/results/pretrained, and one that is there is skipped.
Stock is judged on the same rows. Only self-attention is swapped, an encoder's and a decoder's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import ROOT
from benchmarks.measurements.run_files import file_of, measured_on, missing, parser_of, write
from benchmarks.paper.language_modelling import LanguageModel
from benchmarks.paper.task import Task
from benchmarks.pretrained.tasks import TASKS
from examples.shared.loop import GroupedBatches
from hf_synthesizer import Suggestion, SynthesizerConfig, patch_model, suggest_heads, transfer_attention
from hf_synthesizer.synthesizers import RandomSynthesizer

RESULTS = ALL_RESULTS / "pretrained"
LINES = (("random", "heads"), ("random", "layers"), ("random+salience", "heads"))
"""Which variant, and whether heads are chosen or whole layers."""
SHARES = (25, 50)
COSTS = "random"
"""What the costs of heads are measured with: it has a closed form, and `salience` beside rotated queries has none."""
MEASURED = 32
"""How many rows `suggest_heads` and the closed form look at."""
LONG = {"smollm2_long": [("random", "heads")]}
"""What has a longer transfer, and which lines of it."""
STEPS = {"smollm2": 120, "smollm2_long": 600, "translation": 250, "summarization": 150}
"""Of the transfer, all of them end to end: the closed form has done what a few steps layer by layer would do."""


@dataclass(frozen=True)
class Run:
    """One line of a table."""

    task: str
    variant: str
    share: int
    by: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-{self.share}-{self.by}-seed{self.seed}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


def all_runs() -> list[Run]:
    """Everything that the tables need."""
    return [
        Run(task, variant, share, by) for task in TASKS for variant, by in LONG.get(task, LINES) for share in SHARES
    ]


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, "smollm2-random-25-heads-seed0", TASKS, "outputs/pretrained", "costs")
    parser.add_argument("--weights", type=Path, help="the folder that benchmarks/pretrained/fetch_weights.py filled")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="a folder with mt, lm and summ"
    )
    parser.add_argument("--quick", action="store_true", help="few rows and steps, to try it; kept in --work_dir")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    folder = arguments.work_dir / "quick" / "results" if arguments.quick else RESULTS
    to_do = missing(all_runs(), lambda run: file_of(run.path(folder)), arguments)
    where = measured_on()
    for name, group in itertools.groupby(to_do, key=lambda run: run.task):
        bench = Bench(name, arguments)
        for run in group:
            result = {**bench.measure(run), **where}
            write(run.path(folder), result)
            scores = ", ".join(f"{point} {found['score']:.2f}" for point, found in result["points"].items())
            print(f"{run.name}: {scores}; stock {result['stock']:.2f}", flush=True)


class Bench:
    """A task, its stock model, and what that model gives, each made once."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.task: Task = TASKS[name](arguments.data, arguments.work_dir, arguments.weights, arguments.quick)
        self.steps = (0, 3 if arguments.quick else STEPS[name])
        self.teacher: PreTrainedModel = self.task.build().eval()
        self.costs = self.task.work / f"{name}-costs.json"

    @cached_property
    def stock(self) -> float:
        """The teacher's own score."""
        return self.task.judge(self.teacher)[self.task.score]

    def batches(self, seed: int, rows: int | None = None) -> GroupedBatches:
        return GroupedBatches(self.task.rows[:rows], self.task.size.batch_size, self.task.collate, seed=seed)

    @property
    def measured(self) -> int:
        """How many batches MEASURED rows are."""
        return -(-MEASURED // self.task.size.batch_size)

    def suggestion(self, seed: int) -> Suggestion:
        """The costs of all heads by COSTS, measured once for all variants and shares."""
        if not self.costs.exists():
            set_seed(seed)
            found = suggest_heads(
                self.teacher,
                self.batches(seed, MEASURED),
                COSTS,
                [share / 100 for share in SHARES],
                batches=self.measured,
                autocast=torch.bfloat16,
                progress=False,
                max_length=self.task.size.max_length,
            )
            self.costs.parent.mkdir(parents=True, exist_ok=True)
            found.save(self.costs)
        return Suggestion.load(self.costs)

    def plan(self, run: Run) -> dict[Any, Any]:
        """What `patch_model` gets: the cheapest heads, or the layers whose heads cost least together."""
        suggestion = self.suggestion(run.seed)
        if run.by == "heads":
            chosen = suggestion.at(run.share / 100).heads
            return {layer: SynthesizerConfig(run.variant, heads=heads) for layer, heads in chosen.items() if heads}
        order = sorted(suggestion.costs, key=lambda layer: sum(suggestion.costs[layer]))
        return dict.fromkeys(order[: math.ceil(run.share * len(order) / 100)], run.variant)

    def measure(self, run: Run) -> dict[str, Any]:
        """Its three points, each from the one before."""
        plan = self.plan(run)
        set_seed(run.seed)
        model = copy.deepcopy(self.teacher)
        patch_model(model, plan, max_length=self.task.size.max_length)
        points = {"fresh": self.point(model)}
        for name, method, steps in (("closed", "auto", (0, 0)), ("transfer", "distill", self.steps)):
            started = time.process_time()
            report = transfer_attention(
                model,
                self.teacher,
                self.batches(run.seed, None if any(steps) else MEASURED),
                method,
                steps,
                average_batches=self.measured,
                autocast=torch.bfloat16,
                progress=False,
            )
            seconds = time.process_time() - started
            points[name] = {
                **self.point(model),
                "steps": report.steps,
                "error": report.error_after,
                "seconds": seconds,
            }
            if name == "closed" and run.variant == "random" and isinstance(self.task, LanguageModel):
                points["distance"] = self.point(by_distance(copy.deepcopy(model)))
        chosen = {str(key): getattr(value, "heads", None) for key, value in plan.items()}
        return {
            **asdict(run),
            "score_name": self.task.score,
            "stock": self.stock,
            "points": points,
            "layers": {key: None if heads is None else list(heads) for key, heads in chosen.items()},
            "costs": {str(key): costs for key, costs in self.suggestion(run.seed).costs.items()},
            "size": asdict(self.task.size),
        }

    def point(self, model: PreTrainedModel) -> dict[str, Any]:
        """What the model is worth as it is."""
        metrics = self.task.judge(model)
        return {"score": metrics[self.task.score], "metrics": metrics}


@torch.no_grad()
def by_distance(model: PreTrainedModel) -> PreTrainedModel:
    """A causal model in which each table has one weight for each distance, the mean of its own; the first token, on which decoders
    rest what they do not need, stays apart."""
    for module in model.modules():
        if isinstance(module, RandomSynthesizer):
            for distance in range(module.table.shape[-1] - 1):
                pairs = module.table.diagonal(-distance, 1, 2)[:, 1:]  # without the one that looks at the first token
                pairs.copy_(pairs.exp().mean(-1, keepdim=True).log().expand_as(pairs))
    return model


if __name__ == "__main__":
    main()
