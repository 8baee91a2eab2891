"""What a bias of the values would add to the closed form of heads: each synthesized head's mean output becomes its teacher's.

    python -m benchmarks.heads.value_biases --glue_dir ../shared/data/glue --tasks mrpc

A constant table gives `mean(weights) · values`, and on the mean over tokens a head gives that and the covariance of its weights with
its values, which looks past a constant. Weights of a query sum to 1, so that a bias of the values moves a head's output by itself, and
a closed form could make up for it. This script writes one line a task, variant and share into
benchmarks/results/value_biases.csv: the score relative to the stock model that was converted, and the squared change of the answers
relative to their size, on the validation rows, without the bias and with it. Biases are those at the teacher's hidden states, on the
rows that closed forms are made of. Teachers and closed forms are those of benchmarks/heads/curve.py. The library does not do this: values
are stock's own, and stay so.
"""

from __future__ import annotations

import csv
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.heads import curve
from benchmarks.heads.command_line import bench_of, parser_of
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import processor
from examples.shared.loop import outputs_of
from hf_synthesizer.transfer.observe import LayerPair, learners_of, observing, pair_layers

RESULTS = ALL_RESULTS / "value_biases.csv"

SHARES = (50, 75, 90, 95)


def main(argv: list[str] | None = None) -> None:
    """Measure the tasks that are asked for, and write the file anew."""
    parser = parser_of(__doc__, RESULTS, 32, "of 32 rows, over which outputs are averaged")
    parser.add_argument("--variants", nargs="*", choices=curve.VARIANTS, default=["random", "random+salience"])
    given = parser.parse_args(argv)
    bench = bench_of(given)
    rows = [
        line
        for task in given.tasks
        for variant in given.variants
        for line in measure(bench, task, variant, given.batches)
    ]
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def measure(bench: curve.Bench, task: str, variant: str, batches: int) -> list[dict[str, Any]]:
    """One line for each share."""
    run = curve.Run(task, variant, "heads", 100, 0)
    teacher = bench.stock_teacher(run)
    whole = bench.all_heads(run, teacher).model
    biases = biases_of(whole, teacher, list(bench.unlabelled(run, curve.AVERAGED))[:batches])
    stock = answers(bench, run, teacher)
    lines = []
    for share in SHARES:
        model = bench.converted(curve.Run(task, variant, "heads", share, 0), teacher)
        line: dict[str, Any] = {"task": task, "variant": variant, "share": share}
        for name in ("without", "with"):
            if name == "with":
                add(model, teacher, biases)
            change = (answers(bench, run, model) - stock).square().sum() / stock.square().sum()
            line[f"score_{name}"] = f"{bench.score(model, run)[0] / bench.score(teacher, run)[0]:.4f}"
            line[f"change_{name}"] = f"{change.item():.3g}"
        lines.append({**line, "machine": processor(), "commit": bench.commit})
    return lines


def answers(bench: curve.Bench, run: curve.Run, model: PreTrainedModel) -> torch.Tensor:
    """Logits on the validation rows, less what all classes have alike."""
    found = torch.from_numpy(outputs_of(model, bench.rows(run.task)["validation"], bench.collate))
    return found - found.mean(-1, keepdim=True) if found.shape[-1] > 1 else found


@torch.no_grad()
def biases_of(model: PreTrainedModel, teacher: PreTrainedModel, batches: list[Any]) -> dict[str, torch.Tensor]:
    """For each layer the teacher's mean output less the synthesized one's at the same hidden states, (H·d_v)."""
    pairs = pair_layers(model, teacher)
    sums = {pair.label: torch.zeros(pair.student.value.out_features, dtype=torch.float64) for pair in pairs}
    tokens = 0

    def watch(pair: LayerPair) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            sums[pair.label] += (output[0] - pair.student(*args, **kwargs)[0])[keep].double().sum(0)

        return pair.teacher.register_forward_hook(hook, with_kwargs=True)

    with observing(model, teacher):
        handles = [watch(pair) for pair in pairs]
        for batch in batches:
            keep = batch["attention_mask"].bool()
            tokens += int(keep.sum())
            teacher(**batch)
        for handle in handles:
            handle.remove()
    return {label: total / tokens for label, total in sums.items()}


@torch.no_grad()
def add(model: PreTrainedModel, teacher: PreTrainedModel, biases: dict[str, torch.Tensor]) -> None:
    """Give the values of synthesized heads their biases."""
    for pair in pair_layers(model, teacher):
        chosen = [head for learner in learners_of(pair) for head in learner.heads]
        bias = pair.student.value.bias
        rows = bias.view(pair.student.dimensions[1], -1)
        rows[chosen] += biases[pair.label].view_as(rows)[chosen].to(bias)


if __name__ == "__main__":
    main()
