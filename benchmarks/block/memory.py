"""Peak memory of one attention block, each measured in a fresh process (Linux).

    python -m benchmarks.block.memory                # inference and training, lengths up to 4096, batch 1
    python -m benchmarks.block.memory --device cuda  # or mps, xpu: on the GPU that is there

`weights_mb` is what the block's parameters and buffers take. `peak_mb` is the highest resident size of one run minus the
resident size just before it, when libraries, weights and inputs are there (and a run on 64 tokens has loaded what the
first run loads). `total_mb` is their sum. On another device than a processor, its own allocator counts what tensors hold.

glibc keeps freed memory for later, more or less of it by what went before. All processes, stock's too, run with its mmap
threshold held at the documented default (MALLOC_MMAP_THRESHOLD_), so that freed tensors go back and the peak is what a run
needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from tqdm import tqdm

from benchmarks.block.attention import inference, step
from benchmarks.block.blocks import BLOCKS, STOCK, WIDTH, build, estimated_bytes, keep, mask_for
from benchmarks.measurements import devices
from benchmarks.measurements.grid import (
    FAILURES,
    Cell,
    cells,
    make_quick,
    parser,
    reason,
    require_memory,
    results,
    with_device,
)
from benchmarks.measurements.process_memory import reset_peak_memory, resident_memory
from benchmarks.measurements.records import ROOT, Row

FIELDS = ("status", "reason", "weights_mb", "peak_mb", "total_mb", "device")


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet, one process a line."""
    made = with_device(parser(__doc__, "memory.csv", BLOCKS))
    made.set_defaults(batch_sizes=[1], dtypes=["float32"])
    made.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = made.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.one:
        print(json.dumps(measure(arguments.one.pop("variant"), Cell(**arguments.one))))
        return
    if arguments.quick:
        make_quick(arguments, [STOCK, "random"], length=128)
        arguments.modes = ["inference"]
    found_before = results(arguments, FIELDS)
    grid = [(cell, name) for cell in cells(arguments) for name in arguments.variants]
    bar = tqdm(grid, unit="process", desc="memory")
    for cell, name in bar:
        row = cell.row("memory", "block", name)
        if arguments.force or not found_before.has(row):
            bar.set_postfix_str(f"{name} {cell.mode} {cell.padding} {cell.length}x{cell.batch_size}")
            found_before.add({**row, **in_fresh_process(name, cell, arguments.threads)})


def in_fresh_process(name: str, cell: Cell, threads: int | None) -> Row:
    """`measure`, in a process of its own."""
    one = json.dumps({"variant": name, **dataclasses.asdict(cell)})
    options = ["--threads", str(threads)] if threads else []
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.block.memory", "--one", one, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"status": "skipped", "reason": f"exit {done.returncode}: {done.stderr.strip()[-120:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, cell: Cell) -> Row:
    """Weights and peak of one run, in MB (10⁶ bytes)."""
    torch.manual_seed(0)
    try:
        require_memory(estimated_bytes(name, cell.batch_size, cell.length, cell.torch_dtype, cell.train), cell.device)
        block = build(name, cell.length, cell.torch_dtype, cell.dropout, cell.train).to(cell.device)
        small = build(name, 64, cell.torch_dtype, cell.dropout, cell.train).to(cell.device)
        peak = 0
        for module, length in ((small, 64), (block, cell.length)):
            hidden_states = torch.randn(cell.batch_size, length, WIDTH).to(cell.device, cell.torch_dtype)
            gradient = torch.randn_like(hidden_states)
            hidden_states.requires_grad_(cell.train)
            kept = keep(cell.batch_size, length).to(cell.device) if cell.padding == "ragged" else None
            mask = mask_for(name, kept, hidden_states.detach())
            run = step(module, hidden_states, mask, gradient) if cell.train else inference(module, hidden_states, mask)
            gc.collect()
            peak = peak_of(run, cell.device)
    except FAILURES as error:
        return {"status": "skipped", "reason": reason(error)}
    weights = sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))
    megabytes = {"weights_mb": weights, "peak_mb": peak, "total_mb": weights + peak}
    return {"status": "ok", **{column: f"{number / 1e6:.1f}" for column, number in megabytes.items()}}


def peak_of(run: Callable[[], object], device: str) -> int:
    """The most bytes that a run takes beside what is there before it."""
    if device != "cpu":
        before = devices.reset_peak_memory(device)
        run()
        return devices.peak_memory(device) - before
    reset_peak_memory()
    before, _ = resident_memory()
    run()
    return resident_memory()[1] - before


if __name__ == "__main__":
    main()
