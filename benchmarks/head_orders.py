#!/usr/bin/env python
"""How well the order of heads by a gradient agrees with that by swaps one by one, and what each order's heads do together.

    python benchmarks/head_orders.py --glue_dir ../shared/data/glue --tasks mrpc stsb

`suggest_heads` orders heads by the derivative of the answers at a gate of each head. That is the first order of what the swap of a
head alone does, which this script measures as well: each head swapped by itself, on the same rows. It writes one line a task,
variant, order and share into benchmarks/results/head_orders.csv: Spearman's correlation of both orders, and the squared change of
the answers, relative to them, when that share of the heads is swapped by the order. Teachers are those of benchmarks/heads.py.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "head_orders.csv"

spec = importlib.util.spec_from_file_location("benchmark_of_heads", ROOT / "benchmarks" / "heads.py")
assert spec is not None and spec.loader is not None
heads = sys.modules["benchmark_of_heads"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heads)

from hf_synthesizer import suggest_heads  # noqa: E402
from hf_synthesizer.transfer.head_gates import gated  # noqa: E402
from hf_synthesizer.transfer.observe import observing, pair_layers  # noqa: E402
from hf_synthesizer.transfer.suggest import change_of_answers, head_costs, taught  # noqa: E402
