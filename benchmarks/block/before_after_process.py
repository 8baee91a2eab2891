"""The process of one checkout in `before_after.py`: cells come in as JSON, times go out.

This file runs by its path, with the checkout in PYTHONPATH, so that library and blocks are those of the checkout, whichever it is.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hf_synthesizer

try:
    from benchmarks.block import attention, blocks
except ImportError:  # in checkouts of before, benchmarks/ was a folder of scripts, and no package
    import attention
    import blocks


def main() -> None:
    """Answer until the input ends."""
    root, runs = Path(sys.argv[1]), int(sys.argv[2])
    if not Path(hf_synthesizer.__file__).is_relative_to(root):
        raise SystemExit(f"{hf_synthesizer.__file__} is not of the checkout {root}.")
    known, run, forget = None, None, None
    for line in sys.stdin:
        cell = json.loads(line)
        if cell != known:
            known, (run, forget) = cell, prepare(cell)
            run()
        assert run is not None and forget is not None
        times = []
        for _ in range(1 + runs):
            forget()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(json.dumps(times[1:]), flush=True)


def prepare(cell: dict[str, Any]) -> tuple[Any, Any]:
    """What is timed of a cell, and what drops the gradients before it."""
    torch.manual_seed(0)
    dtype, train = getattr(torch, cell["dtype"]), cell["mode"] == "train"
    hidden_states = torch.randn(cell["batch_size"], cell["length"], blocks.WIDTH).to(dtype)
    gradient = torch.randn_like(hidden_states)
    hidden_states.requires_grad_(train)
    kept = blocks.keep(cell["batch_size"], cell["length"]) if cell["padding"] == "ragged" else None
    mask = blocks.mask_for(cell["variant"], kept, hidden_states.detach())
    block = blocks.build(cell["variant"], cell["length"], dtype, cell["dropout"], train)

    def forget() -> None:
        hidden_states.grad = None
        block.zero_grad(set_to_none=True)

    if train:
        return attention.step(block, hidden_states, mask, gradient), forget
    return attention.inference(block, hidden_states, mask), forget


if __name__ == "__main__":
    main()
