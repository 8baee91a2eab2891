"""The patterns of `sparse_strided` and `sparse_fixed` by our route, and by compiled FlexAttention with a block mask.

    python -m benchmarks.sparse.flex_attention

Forward without gradients, 12 heads of 64, batch 1, float32; block masks are made beforehand, and not counted. Needs the C++
compiler that torch.compile needs on a CPU.
"""

from __future__ import annotations

import argparse
import csv
from math import isqrt
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measurements.records import RESULTS, provenance, quick_output, threads
from hf_synthesizer.attend import attend
from hf_synthesizer.choices import FixedBlocks, Strides
from hf_synthesizer.logits.forms import Sparse
from hf_synthesizer.measuring.timing import interleaved

HEADS, WIDTH = 12, 64


def main(argv: list[str] | None = None) -> None:
    """Measure both, compare their outputs, write flex.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS / "flex.csv")
    parser.add_argument("--quick", action="store_true", help="one short length, to show that everything works")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.lengths, arguments.seconds, arguments.output = [128], 0.0, quick_output(arguments.output)
    torch.manual_seed(0)
    compiled = torch.compile(flex_attention)
    rows = []
    with torch.no_grad():
        for length in arguments.lengths:
            x = torch.randn(1, HEADS, length, WIDTH)
            value = torch.randn_like(x)
            for name, pattern in (("sparse_strided", Strides), ("sparse_fixed", FixedBlocks)):
                rule, stride = pattern(None, 1), isqrt(length)

                def pairs(b, h, i, j, rule=rule, stride=stride):
                    near, far = rule.pairs(i, j, torch.full_like(i, stride))
                    return torch.where(h < HEADS // 2, near, far)

                mask = create_block_mask(pairs, None, HEADS, length, length, device="cpu")
                logits = Sparse(x, x, WIDTH**-0.5, rule)

                def ours(logits=logits, value=value):
                    return attend(logits, value)[0]

                def flex(x=x, value=value, mask=mask):
                    return compiled(x, x, value, block_mask=mask)

                torch.testing.assert_close(flex(), ours(), rtol=1e-4, atol=1e-5)
                spreads = interleaved({"ours": ours, "flex": flex}, 15, arguments.seconds)
                for way, spread in spreads.items():
                    row = {"variant": name, "way": way, "length": str(length), "threads": threads()}
                    rows.append({**row, **spread.row(), "sparsity": f"{mask.sparsity():.1f}", **provenance()})
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
