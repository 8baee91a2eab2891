"""Times one attention block of BERT-base's width: stock, synthesized, fused, the floor and peers, in one interleaved run.

    python -m benchmarks.block.attention                                     # the whole grid, as far as it is missing
    python -m benchmarks.block.attention --lengths 512 --modes train --variants random,dense
    python -m benchmarks.report.tables && python -m benchmarks.report.plots  # tables and plots

    python -m benchmarks.block.attention --device cuda  # or mps, xpu: on the GPU that is there

See benchmarks/block/blocks.py for what is compared, and benchmarks/block/account.py for what a form has to cost here: `own_floor_ms`.
`same_library_ms` is stock SDPA with its projections through our library, in the same run, and `same_library_speedup` how often the
line's time fits into it: the ratio of every headline. A step of training is a forward and a backward, to the weights and to the
hidden states; no optimizer. In a ragged batch the masks are those that Transformers makes; as in a model, where all layers
get the same mask, it is made once, and not for each run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.block.account import exponentials, own_floor, peak
from benchmarks.block.blocks import BLOCKS, SAME_LIBRARY, STOCK, WIDTH, build, estimated_bytes, keep, mask_for
from benchmarks.measurements.grid import (
    FAILURES,
    Cell,
    Measured,
    make_quick,
    parser,
    reason,
    require_memory,
    walk,
    with_device,
)
from benchmarks.measurements.records import Row, provenance, threads
from hf_synthesizer.measuring.timing import Spread, interleaved

FIELDS = (
    "same_library_ms",
    "same_library_speedup",
    "own_floor_ms",
    "share_of_own_floor",
    "share_of_floor",
    "peak_gflops",
)
"""The last but one is the measured time of given weights (`floor`) by the line's."""
FLOOR = "floor"


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    arguments = with_device(parser(__doc__, "attention.csv", BLOCKS)).parse_args(argv)
    if arguments.quick:
        make_quick(arguments, [STOCK, "stock eager", "floor", "random", "dense+salience", "fnet", "linformer"])

    def measure(model: str, cell: Cell, variants: list[str]) -> list[Measured]:
        return measure_cell(cell, variants, arguments.repeats, arguments.seconds)

    walk("attention", ("block",), arguments, measure, FIELDS)
    if arguments.device == "cpu":
        print(account(arguments.dtypes))


def account(dtypes: list[str]) -> str:
    """What this machine can do, on which the floors of the forms rest."""
    here = provenance()
    lines = [f"{here['cpu']}, {here['instruction_set']}, {threads()} threads"]
    lines += [f"peak, {name}: {2e-9 * peak(getattr(torch, name)):.0f} GFLOP/s" for name in dtypes]
    return "\n".join([*lines, f"exponentials: {1e-9 * exponentials():.1f} G/s"])


def measure_cell(cell: Cell, variants: list[str], rounds: int, seconds: float) -> list[Measured]:
    """All variants of a cell in one interleaved run, with stock SDPA among them."""
    torch.manual_seed(0)
    hidden_states = torch.randn(cell.batch_size, cell.length, WIDTH).to(cell.device, cell.torch_dtype)
    gradient = torch.randn_like(hidden_states)
    hidden_states.requires_grad_(cell.train)
    kept = keep(cell.batch_size, cell.length).to(cell.device) if cell.padding == "ragged" else None
    runs: dict[str, Callable[[], object]] = {}
    blocks: list[nn.Module] = []
    skipped: dict[str, str] = {}
    for name in dict.fromkeys([STOCK, SAME_LIBRARY, FLOOR, *variants]):
        try:
            require_memory(
                estimated_bytes(name, cell.batch_size, cell.length, cell.torch_dtype, cell.train), cell.device
            )
            mask = mask_for(name, kept, hidden_states.detach())
            block = build(name, cell.length, cell.torch_dtype, cell.dropout, cell.train).to(cell.device)
            run = step(block, hidden_states, mask, gradient) if cell.train else inference(block, hidden_states, mask)
            run()
        except FAILURES as error:
            skipped[name] = reason(error)
            continue
        blocks.append(block)
        runs[name] = run

    if STOCK in skipped:
        raise SystemExit(f"Stock SDPA cannot run here, and there is nothing to compare with: {skipped[STOCK]}.")

    def forget_gradients() -> None:
        hidden_states.grad = None
        for block in blocks:
            block.zero_grad(set_to_none=True)

    spreads = interleaved(runs, rounds, seconds, before=forget_gradients, wait=cell.wait)
    return [
        (name, skipped.get(name) or spreads[name], spreads[STOCK], floors(name, cell, spreads)) for name in variants
    ]


def floors(name: str, cell: Cell, spreads: dict[str, Spread]) -> Row:
    """What else there is to compare a line with."""
    row: Row = {}
    if name not in spreads:
        return row
    own = spreads[name].median
    if SAME_LIBRARY in spreads:
        same = spreads[SAME_LIBRARY].median
        row |= {"same_library_ms": f"{same:.3f}", "same_library_speedup": f"{same / own:.3f}"}
    if FLOOR in spreads:
        row["share_of_floor"] = f"{spreads[FLOOR].median / own:.3f}"
    least = (
        own_floor(name, cell.length, cell.batch_size, cell.torch_dtype, cell.train) if cell.device == "cpu" else None
    )
    if least is not None:
        row |= {
            "own_floor_ms": f"{least:.3f}",
            "share_of_own_floor": f"{least / own:.3f}",
            "peak_gflops": f"{2e-9 * peak(cell.torch_dtype):.0f}",
        }
    return row


def inference(block: nn.Module, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> Callable[[], object]:
    """A forward without gradients."""

    def run() -> None:
        with torch.no_grad():
            block(hidden_states, mask)

    return run


def step(
    block: nn.Module, hidden_states: torch.Tensor, mask: torch.Tensor | None, gradient: torch.Tensor
) -> Callable[[], object]:
    """A forward and a backward."""

    def run() -> None:
        block(hidden_states, mask).backward(gradient)

    return run


if __name__ == "__main__":
    main()
