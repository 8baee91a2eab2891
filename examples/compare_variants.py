"""Print shapes, parameters and FLOPs of every variant as a standalone layer, beside dot-product attention.

python examples/compare_variants.py --hidden_size 1024 --length 32
"""

from __future__ import annotations

import argparse

import torch

from hf_synthesizer import SynthesizerAttention, count_flops, count_parameters, list_variants

MIXTURES = ("random+dot_product", "dense+dot_product", "random+dense", "random+salience", "dense+salience")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--num_heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument(
        "--max_length", type=int, help="the longest sequence the logits are built for (default: length)"
    )
    parser.add_argument("--batch_size", type=int, default=1)
    arguments = parser.parse_args(argv)

    hidden_states = torch.randn(arguments.batch_size, arguments.length, arguments.hidden_size)
    variants = ["dot_product", *(name for name in list_variants() if name != "dot_product"), *MIXTURES]
    rows = []
    for variant in variants:
        layer = SynthesizerAttention(
            arguments.hidden_size,
            arguments.num_heads,
            variant=variant,
            max_length=arguments.max_length or arguments.length,
        ).eval()
        with torch.no_grad():
            output, weights = layer(hidden_states)
        logits, flops = count_parameters(layer.synthesizer), count_flops(layer, hidden_states, need_weights=False)
        rows.append((variant, tuple(output.shape), tuple(weights.shape), logits, count_parameters(layer), flops))

    stock = rows[0]
    header = ("variant", "output", "attention", "logit params", "layer params", "vs stock", "MFLOPs", "vs stock")
    table = [header] + [
        (
            variant,
            str(output),
            str(weights),
            f"{logits:,}",
            f"{layer:,}",
            f"{layer / stock[4]:.2f}",
            f"{flops / 1e6:.1f}",
            f"{flops / stock[5]:.2f}",
        )
        for variant, output, weights, logits, layer, flops in rows
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for number, row in enumerate(table):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print("\nFLOPs are those of matrix products and attention kernels, a multiply-add counted as two.")


if __name__ == "__main__":
    main()
