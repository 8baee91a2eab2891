"""Times what users wait for before anything is computed: the import, `patch_model`, and the first forward.

    python -m benchmarks.model.startup  # BERT-base's size, random weights
    python -m benchmarks.model.startup --quick

Each number is the median of several fresh processes. `import` is `import hf_synthesizer` where torch and Transformers have been
imported, `import, alone` in an empty process; `patch` is `patch_model` on a model that is there; `first forward` the first
call of the patched model on 8 rows of 128 tokens, `stock first forward` that of the model before the patch in a process of
its own, and `second forward` what a forward takes from then on. `kernels` is how long the native kernels take to be built
where they never were.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measurements.records import RESULTS, Results, quick_output, threads

FIELDS = ("median_ms", "least_ms", "most_ms", "rounds")
VARIANTS = ("random", "dense", "factorized_dense", "random+dot_product")
ALONE = """
import json, time
start = time.perf_counter()
import hf_synthesizer
print(json.dumps({"import, alone": time.perf_counter() - start}))
"""
PROCESS = """
import json, sys, time
import torch, transformers
from transformers import BertConfig, BertForSequenceClassification
variant, size, rows, length = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
model = BertForSequenceClassification(BertConfig(**size)).eval()
ids = torch.randint(0, 100, (rows, length))
made = {}

def timed(name, run):
    start = time.perf_counter()
    found = run()
    made[name] = time.perf_counter() - start
    return found

if variant != "stock":
    timed("import", lambda: __import__("hf_synthesizer"))
    from hf_synthesizer import patch_model
    model = timed("patch", lambda: patch_model(model, variant=variant))
name = "first forward" if variant != "stock" else "stock first forward"
with torch.no_grad():
    timed(name, lambda: model(ids))
    timed(name.replace("first", "second"), lambda: model(ids))
print(json.dumps(made))
"""
KERNELS = """
import json, time
import torch
from hf_synthesizer.attend.native import build
start = time.perf_counter()
build.library()
print(json.dumps({"kernels": time.perf_counter() - start}))
"""


def main(argv: list[str] | None = None) -> None:
    """Measure everything, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each number")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.csv", help="the CSV file that grows")
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    arguments = parser.parse_args(argv)
    size: dict[str, int] = {}
    rows, length = 8, 128
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        size["max_position_embeddings"] = 16
        arguments.variants, arguments.repeats, rows, length = "random", 1, 1, 8
    results = Results(arguments.output, FIELDS)
    runs = [("alone", ALONE), ("kernels", KERNELS), ("stock", PROCESS)]
    for variant, script in [*runs, *((name, PROCESS) for name in arguments.variants.split(","))]:
        found = [process(script, variant, json.dumps(size), rows, length) for _ in range(arguments.repeats)]
        for name in found[0]:
            times = [1e3 * each[name] for each in found]
            results.add(
                {
                    "benchmark": "startup",
                    "model": "tiny bert" if arguments.quick else "bert-base",
                    "variant": variant,
                    "mode": name,
                    "length": str(length),
                    "batch_size": str(rows),
                    "threads": threads(),
                    "median_ms": f"{statistics.median(times):.1f}",
                    "least_ms": f"{min(times):.1f}",
                    "most_ms": f"{max(times):.1f}",
                    "rounds": str(len(times)),
                }
            )


def process(script: str, *arguments: object) -> dict[str, float]:
    """Seconds by name, measured in a process of its own; kernels are built anew where they are what is measured."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "XDG_CACHE_HOME": empty} if script is KERNELS else dict(os.environ)
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)], env=environment, capture_output=True, text=True
        )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
