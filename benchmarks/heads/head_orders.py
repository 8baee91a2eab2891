"""How well the order of heads by a gradient agrees with that of swaps one by one, and what each order's heads do together.

    python -m benchmarks.heads.head_orders --glue_dir ../shared/data/glue --tasks mrpc stsb

`suggest_heads` orders heads by the derivative of the answers at a gate of each head: the first order of what the swap of that head
alone does. This script swaps each head alone as well, on the same training rows, and writes one line a task and order into
benchmarks/results/head_orders.csv: Spearman's correlation of the two orders, and the squared change of the answers, relative to
their size, when 50, 75, 90 and 95 % of the heads are swapped together by an order. Both are measured on the rows that the orders come
from, and the changes on as many other rows too. Teachers are those of benchmarks/heads/curve.py.
"""

from __future__ import annotations

import copy
import csv
import itertools
import time

import torch

from benchmarks.glue import scores as glue
from benchmarks.heads import curve
from benchmarks.heads.command_line import bench_of, parser_of
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import processor
from examples.shared.loop import unlabelled
from hf_synthesizer import Suggestion, SynthesizerConfig, patch_model, transfer_attention
from hf_synthesizer.transfer.head_gates import gated
from hf_synthesizer.transfer.observe import observing, pair_layers
from hf_synthesizer.transfer.suggest import change_of_answers, head_costs

RESULTS = ALL_RESULTS / "head_orders.csv"

SHARES = (0.5, 0.75, 0.9, 0.95)
AVERAGED = 20
"""Batches that the closed form is made of."""


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for, and add it to the file."""
    parser = parser_of(__doc__, RESULTS, 4, "of 32 rows, on which costs are measured")
    parser.add_argument("--variant", default="random+salience")
    given = parser.parse_args(argv)
    bench = bench_of(given)
    lines: list[dict[str, str]] = []
    if given.output.exists():
        with given.output.open(newline="") as file:
            lines = [row for row in csv.DictReader(file) if row["task"] not in given.tasks]
    for task in given.tasks:
        lines += measure(bench, task, given.variant, given.batches)
        with given.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def measure(bench: curve.Bench, task: str, variant: str, batches: int) -> list[dict[str, str]]:
    """One line for each of the two orders."""
    teacher = bench.stock_teacher(curve.Run(task, "stock", "heads", 0, 0))
    student = patch_model(copy.deepcopy(teacher), variant, max_length=glue.MAX_LENGTH)
    loader = bench.batches(unlabelled(bench.rows(task)["train"]), 0)
    transfer_attention(student, teacher, loader, method="average", average_batches=AVERAGED, progress=False)
    pairs = pair_layers(student, teacher)
    number = {pair.label: pair.student.dimensions[1] for pair in pairs}
    rows = [dict(batch) for batch in itertools.islice(loader, 2 * batches)]
    for model in (teacher, student):
        model.requires_grad_(False)
    orders: dict[str, tuple[Suggestion, float]] = {}
    with observing(teacher, student), gated(pairs) as gates:
        started = time.process_time()
        found = head_costs(teacher, gates, rows[:batches], number)
        orders["gradient"] = suggestion(variant, found), time.process_time() - started
        started = time.process_time()
        alone = {
            label: [
                change_of_answers(teacher, gates, rows[:batches], {label: [head]}, number) for head in range(count)
            ]
            for label, count in number.items()
        }
        orders["one by one"] = suggestion(variant, alone), time.process_time() - started
        ranks = torch.stack([ranked([cost for row in costs.values() for cost in row]) for costs in (found, alone)])
        agreement = torch.corrcoef(ranks)[0, 1].item()
        return [
            {
                "task": task,
                "variant": variant,
                "order": name,
                "rows": str(batches * glue.BATCH_SIZE),
                "seconds": f"{seconds:.0f}",
                "correlation": f"{agreement:.3f}",
                **{
                    f"{which}_{100 * share:.0f}": f"{change_of_answers(teacher, gates, on, chosen(order, share), number):.4f}"
                    for share in SHARES
                    for which, on in (("change", rows[:batches]), ("other_rows", rows[batches:]))
                },
                "machine": processor(),
                "commit": bench.commit,
            }
            for name, (order, seconds) in orders.items()
        ]


def suggestion(variant: str, costs: dict[str, list[float]]) -> Suggestion:
    """The order that costs make."""
    return Suggestion.of_heads(SynthesizerConfig(variant), dict(costs), 1.0)


def chosen(order: Suggestion, share: float) -> dict[str, list[int]]:
    """The cheapest heads of each layer."""
    return {str(layer): found for layer, found in order.at(share).heads.items()}


def ranked(costs: list[float]) -> torch.Tensor:
    """The rank of each."""
    return torch.tensor(costs).argsort().argsort().double()


if __name__ == "__main__":
    main()
