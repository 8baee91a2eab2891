#!/usr/bin/env python
"""What a pretrained decoder keeps when a part of its attention is synthesized: perplexity on WikiText-2's test.

    python benchmarks/fetch_weights.py WEIGHTS --models smollm2
    python benchmarks/decoders.py --weights WEIGHTS/smollm2 --list
    python benchmarks/decoders.py --weights WEIGHTS/smollm2 --points fresh closed --threads 1
    python benchmarks/decoders.py --weights WEIGHTS/smollm2 --threads 2          # the rest, transfers too
    python benchmarks/paper_table.py                                             # the table

A quarter or half of the heads are synthesized, those that `suggest_heads` finds cheapest, or as many whole layers, those whose heads
cost least together. Three points: fresh logits, the closed form, and a transfer of --transfer_steps steps; steps and not minutes, so
that it can be made again; how long they took is in the file. A run is a variant, a share, and heads or layers; it writes one JSON
file into benchmarks/results/decoders, and a point that is there is not measured again. Stock is judged on the same windows.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from records import commit, processor  # noqa: E402

from hf_synthesizer import HeadSuggestion, SynthesizerConfig, patch_model, suggest_heads, transfer_attention  # noqa: E402
from hf_synthesizer.tasks.perplexity import perplexity_of, sums  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decoders"
VARIANTS = ("random", "random+salience")
SHARES = (25, 50)
COSTS = "random"
"""What the costs of heads are measured with: it has a closed form, and `salience` beside rotated queries has none."""
BY = ("heads", "layers")
POINTS = ("fresh", "closed", "transfer")
MEASURED = 32
"""How many windows `suggest_heads` and the closed form look at."""


@dataclass(frozen=True)
class Run:
    """One line of the table."""

    variant: str
    share: int
    by: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.share}-{self.by}-seed{self.seed}"

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def missing(self, points: list[str]) -> list[str]:
        return [point for point in points if point not in self.read().get("points", {})]


def all_runs() -> list[Run]:
    """Everything that the table needs."""
    return [Run(*choice) for choice in itertools.product(VARIANTS, SHARES, BY)]


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="the folder of the model and its tokenizer")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="a folder with lm")
    parser.add_argument("--only", nargs="*", default=[], help="runs by name, such as random-25-heads-seed0")
    parser.add_argument("--points", nargs="*", choices=POINTS, default=list(POINTS), help="these points alone")
    parser.add_argument("--windows", type=int, default=200, help="how many windows of the test are judged")
    parser.add_argument("--max_length", type=int, default=256, help="how many tokens a window has")
    parser.add_argument("--transfer_steps", type=int, default=300, help="of the transfer, a third for its first stage")
    parser.add_argument("--batch_size", type=int, default=4, help="windows of a batch")
    parser.add_argument("--threads", type=int, help="how many cores to use (default: all)")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/decoders"), help="where suggestions are kept")
    parser.add_argument("--list", action="store_true", help="only say which runs are there and which are missing")
    parser.add_argument("--quick", action="store_true", help="few windows and steps, to show that everything works")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.windows, arguments.max_length, arguments.transfer_steps = 8, 16, 3
    runs = [run for run in all_runs() if not arguments.only or run.name in arguments.only]
    missing = [run for run in runs if run.missing(arguments.points)]
    if arguments.list:
        for run in runs:
            print(f"{', '.join(run.missing(arguments.points)) or 'there':28} {run.name}")
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there", flush=True)
    if arguments.list:
        return
    if arguments.weights is None:
        sys.exit("Name the model: --weights FOLDER (benchmarks/fetch_weights.py makes it).")
    bench = Bench(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for run in missing:
        for point in run.missing(arguments.points):
            result = bench.measure(run, point)
            temporary = run.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            temporary.replace(run.path)
            found, stock = result["points"][point]["perplexity"], result["stock_perplexity"]
            print(f"{run.name} {point}: {found:.2f}, {found / stock:.2f} times stock's", flush=True)


class Bench:
    """The stock model and the windows of text, each made once."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(arguments.weights).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.weights)
        self.test = self.windows("test")[: arguments.windows]
        self.train = self.windows("train")[: max(MEASURED, arguments.transfer_steps * arguments.batch_size)]
        self.commit = commit()

    def windows(self, split: str) -> torch.Tensor:
        """A text as windows (number, max_length) one after the other."""
        path = self.arguments.data / "lm" / f"wikitext-2-raw.{split}.txt"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = self.tokenizer(lines, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        tokens = [token for line in found for token in line]
        length = self.arguments.max_length
        return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def batches(self, windows: torch.Tensor, seed: int) -> DataLoader:
        return DataLoader(
            list(windows),  # type: ignore[arg-type]
            batch_size=self.arguments.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=lambda rows: {"input_ids": torch.stack(rows)},
        )

    @cached_property
    def stock(self) -> float:
        """The teacher's own perplexity."""
        return self.perplexity(self.teacher)

    @torch.no_grad()
    def perplexity(self, model: PreTrainedModel) -> float:
        model.eval()
        found = []
        for ids in self.test.split(self.arguments.batch_size):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            found.append(sums(logits, ids, causal=True).numpy())
        return perplexity_of(np.concatenate(found))["perplexity"]

    def suggestion(self, run: Run) -> HeadSuggestion:
        """The costs of all heads by COSTS, measured once for all variants and shares."""
        path = self.arguments.work_dir / f"costs-{self.arguments.max_length}-seed{run.seed}.json"
        if not path.exists():
            set_seed(run.seed)
            found = suggest_heads(
                self.teacher,
                self.batches(self.train[:MEASURED], run.seed),
                COSTS,
                [share / 100 for share in SHARES],
                batches=-(-MEASURED // self.arguments.batch_size),
                max_length=self.arguments.max_length,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        return HeadSuggestion.load(path)

    def plan(self, run: Run) -> dict[Any, Any]:
        """What `patch_model` gets: the cheapest heads, or the layers whose heads cost least together."""
        suggestion = self.suggestion(run)
        if run.by == "heads":
            chosen = suggestion.at(run.share / 100).heads
            return {layer: SynthesizerConfig(run.variant, heads=heads) for layer, heads in chosen.items() if heads}
        order = sorted(suggestion.costs, key=lambda layer: sum(suggestion.costs[layer]))
        return dict.fromkeys(order[: math.ceil(run.share * len(order) / 100)], run.variant)

    def measure(self, run: Run, point: str) -> dict[str, Any]:
        """One point more of a run."""
        plan = self.plan(run)
        set_seed(run.seed)
        model = copy.deepcopy(self.teacher)
        patch_model(model, plan, max_length=self.arguments.max_length)
        started = time.process_time()
        facts: dict[str, Any] = {}
        if point != "fresh":
            steps = self.arguments.transfer_steps if point == "transfer" else 0
            report = transfer_attention(
                model,
                self.teacher,
                self.batches(self.train if steps else self.train[:MEASURED], run.seed),
                steps=(steps // 3, steps - steps // 3),
                average_batches=-(-MEASURED // self.arguments.batch_size),
                autocast=torch.bfloat16,
            )
            facts = {"steps": report.steps, "error": report.error_after, "seconds": time.process_time() - started}
        result = run.read() or {**asdict(run), **self.setting(plan), "points": {}}
        result["points"][point] = {"perplexity": self.perplexity(model), **facts}
        return result

    def setting(self, plan: dict[Any, Any]) -> dict[str, Any]:
        """What is the same for all points of a run."""
        named: dict[str, Callable | Any] = {str(key): getattr(value, "heads", None) for key, value in plan.items()}
        return {
            "layers": {key: None if heads is None else list(heads) for key, heads in named.items()},
            "model": self.arguments.weights.name,
            "stock_perplexity": self.stock,
            "judged_blocks": len(self.test),
            "max_length": self.arguments.max_length,
            "threads": torch.get_num_threads(),
            "machine": f"{processor()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "hf_synthesizer")},
            },
            "commit": self.commit,
            "date": date.today().isoformat(),
        }


if __name__ == "__main__":
    main()
