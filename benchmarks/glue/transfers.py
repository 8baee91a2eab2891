"""Short looks at ways to transfer attention, on one GLUE task and before any fine-tuning.

    python -m benchmarks.glue.transfers --glue_dir ../shared/data/glue --task stsb --recipes closed-form stage1-80

The teacher is stock, fine-tuned on the task with seed 0, as in benchmarks/glue/scores.py; `--seed` is that of the fresh parameters,
of the made-up rows and of their order. Each probe adds a line to
benchmarks/results/glue_probes.csv: the mean divergence of the layers' attention weights (nats) and the error of the hidden
states relative to their variance, before and after, and the task's score on the complete validation set.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.glue import scores as glue
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import quick_output
from examples.shared.loop import GroupedBatches, unlabelled
from hf_synthesizer import transfer_attention
from hf_synthesizer.glue.tasks import get_task
from hf_synthesizer.transfer.variation import special_ids, vary

RESULTS = ALL_RESULTS / "glue_probes.csv"
COLUMNS = "task variant recipe seed divergence_before divergence_after error_before error_after score teacher_score seconds commit"

RECIPES: dict[str, dict[str, Any]] = {
    "closed-form": {"steps": (0, 0)},
    "closed-form, stage1-40": {"steps": (40, 0)},
    "closed-form, stage1-40, five times the rate": {"steps": (40, 0), "learning_rate": 25e-3},
    "stage1-40": {"method": "distill", "steps": (40, 0)},
    "stage1-80": {"method": "distill", "steps": (80, 0)},
    "closed-form, stage1-40, stage2-360": {"steps": (40, 360)},
    "closed-form, stage1-40, stage2-360, five times the rate": {"steps": (40, 360), "learning_rate": 25e-3},
    "closed-form, stage1-40, stage2-360, a fifth of the rate": {"steps": (40, 360), "learning_rate": 1e-3},
    "stage1-40, stage2-360": {"method": "distill", "steps": (40, 360)},
    "real rows, 3 epochs": {"epochs": 3, "share": 0.0},
    "made-up rows, 3 epochs": {"epochs": 3},
    "made-up rows, 9 epochs": {"epochs": 9},
    "made-up rows, 3 epochs in batches of 16": {"epochs": 3, "batch_size": 16},
    "made-up rows, 6 epochs in batches of 16": {"epochs": 6, "batch_size": 16},
    "made-up rows, 6 epochs in batches of 16, backbone at twice the rate": {
        "epochs": 6,
        "batch_size": 16,
        "backbone_learning_rate": 6e-4,
    },
    "made-up rows, 16 epochs in batches of 16": {"epochs": 16, "batch_size": 16},
    "made-up rows, 3 epochs in batches of 16, 3 of answers": {"epochs": 3, "batch_size": 16, "answers": 3},
    "made-up rows, 3 epochs, half from Wikipedia": {"epochs": 3, "foreign": 0.5},
}
"""Options of `transfer_attention`, and of `texts`; those that name epochs take steps for them, and a fifth more in stage 1.
Epochs of answers come after the others, as stage 3, and see other rows."""


def texts(
    bench: Any,
    task: str,
    wikipedia: Path | None,
    *,
    epochs: int | None = None,
    answers: int = 0,
    share: float = 0.75,
    foreign: float = 0.0,
    batch_size: int = 32,
    seed: int = 0,
    **others: Any,
) -> tuple[Any, dict[str, Any]]:
    """The batches of a recipe, and the options of `transfer_attention`. `foreign` is the share of the rows whose texts
    are not the task's.
    """
    rows = unlabelled(bench.rows(task)["train"])
    if epochs is not None:
        special = special_ids(bench.tokenizer)
        size = (epochs + answers) * len(rows)
        options = {"share": share, "max_length": glue.MAX_LENGTH, "seed": seed}
        rows = vary(rows, round((1 - foreign) * size), special, **options)
        if foreign:
            if wikipedia is None:
                raise SystemExit("This recipe needs --text, a file of WikiText.")
            pairs = len(get_task(task).fields) > 1
            rows += vary(foreign_rows(bench, wikipedia, pairs), round(foreign * size), special, **options)
    batches = GroupedBatches(rows, batch_size, bench.collate, seed=seed)
    if epochs is not None:
        last = len(batches) * answers // (epochs + answers)
        others["steps"] = (int(glue.FIRST_STAGE * (len(batches) - last)), len(batches) - last, last)
    return batches, others


def foreign_rows(bench: Any, path: Path, pairs: bool) -> list[dict[str, Any]]:
    """The sentences of 5 to 20 words of a file of WikiText, each followed by the next one where rows are pairs."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("=")]
    sentences = [text.strip() for line in lines for text in line.split(" . ") if 5 <= len(text.split()) <= 20]
    encoded = bench.tokenizer(sentences[:-1], sentences[1:] if pairs else None)
    return [dict(zip(encoded, columns, strict=True)) for columns in zip(*encoded.values(), strict=True)]


def probe(bench: Any, task: str, variant: str, recipe: str, seed: int, wikipedia: Path | None) -> dict[str, Any]:
    """One line."""
    run = glue.Run(task, variant, True, seed)
    teacher = bench.teacher(glue.Run(task, variant, True, 0))
    model = bench.student(run, teacher)
    batches, options = texts(bench, task, wikipedia, seed=seed, **RECIPES[recipe])
    started = time.process_time()
    report = transfer_attention(model, teacher, batches, autocast=torch.bfloat16, **options)
    seconds = time.process_time() - started

    def mean(which: str) -> str:
        return f"{sum(getattr(layer, which) for layer in report.layers) / len(report.layers):.3f}"

    return {
        "task": task,
        "variant": variant,
        "recipe": recipe,
        "seed": seed,
        "divergence_before": mean("before"),
        "divergence_after": mean("after"),
        "error_before": f"{report.error_before:.3f}",
        "error_after": f"{report.error_after:.3f}",
        "score": f"{bench.score(model, run)[0]:.4f}",
        "teacher_score": f"{bench.score(teacher, run)[0]:.4f}",
        "seconds": f"{seconds:.0f}",
        "commit": bench.commit[:10],
    }


def main(argv: list[str] | None = None) -> None:
    """Make the probes that are asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=glue.TASKS, default="stsb")
    parser.add_argument("--variants", nargs="*", default=["dense+salience", "dense", "random+salience", "random"])
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES)[:5])
    parser.add_argument("--text", type=Path, help="a file of WikiText, for recipes with foreign text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments, others = parser.parse_known_args(argv)
    settings = glue.arguments_of(others)
    if settings.quick:
        arguments.output = quick_output(arguments.output)
        arguments.variants, arguments.recipes = arguments.variants[:1], arguments.recipes[:1]
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    bench = glue.Bench(settings)
    found: list[dict[str, Any]] = []
    if arguments.output.exists():
        with arguments.output.open(newline="") as file:
            found = list(csv.DictReader(file))
    for variant in arguments.variants:
        for recipe in arguments.recipes:
            asked = {"task": arguments.task, "variant": variant, "recipe": recipe, "seed": str(arguments.seed)}
            if any(asked.items() <= row.items() for row in found):
                continue
            row = probe(bench, arguments.task, variant, recipe, arguments.seed, arguments.text)
            print(row, flush=True)
            with arguments.output.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS.split())
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
