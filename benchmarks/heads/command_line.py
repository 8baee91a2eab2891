"""What head_orders.py, key_orders.py and value_biases.py share: the benchmark of heads, whose teachers they look at, and a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.glue import scores as glue
from benchmarks.heads import curve
from benchmarks.measurements.records import quick_output


def parser_of(description: str | None, output: Path, batches: int, batches_help: str) -> argparse.ArgumentParser:
    """The options of all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue_dir")
    parser.add_argument("--model")
    parser.add_argument("--tasks", nargs="*", choices=glue.TASKS, default=["mrpc", "stsb"])
    parser.add_argument("--batches", type=int, default=batches, help=batches_help)
    parser.add_argument("--work_dir", default="outputs/benchmark", help="where teachers are kept")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="few rows of one task, to show that everything works")
    parser.add_argument("--output", type=Path, default=output)
    return parser


def bench_of(given: argparse.Namespace) -> curve.Bench:
    """The benchmark of heads with these options."""
    known = ["--work_dir", given.work_dir, *(["--glue_dir", given.glue_dir] if given.glue_dir else [])]
    known += ["--model", given.model] if given.model else []
    if given.quick:
        known.append("--quick")
        given.tasks, given.batches, given.output = given.tasks[:1], 1, quick_output(given.output)
    if given.threads:
        torch.set_num_threads(given.threads)
    return curve.Bench(curve.arguments_of(known))
