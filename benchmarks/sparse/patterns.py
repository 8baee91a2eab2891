"""Draws what eight freshly built heads of `random` with `init="handcrafted"` attend to.

python -m benchmarks.sparse.patterns  # writes patterns.png into benchmarks/results
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

from benchmarks.measurements.records import RESULTS
from hf_synthesizer import SynthesizerConfig
from hf_synthesizer.synthesizers import build_synthesizer
from hf_synthesizer.synthesizers.patterns import PATTERNS

matplotlib.use("Agg")
from matplotlib import pyplot

N, LENGTH = 128, 24


def main(argv: list[str] | None = None) -> None:
    """A table built for N = 128 tokens, looked at by a sequence of 24."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "patterns.png")
    output = parser.parse_args(argv).output
    torch.manual_seed(0)
    made = build_synthesizer(SynthesizerConfig("random", init="handcrafted"), 64, 8, N)
    weights = made(torch.zeros(1, LENGTH, 64)).materialize()[0].softmax(-1).detach()
    figure, axes = pyplot.subplots(2, 4, figsize=(10, 5.4))
    for axis, head, name in zip(axes.flat, weights, (*PATTERNS, "default"), strict=True):
        axis.imshow(head, cmap="Greys", vmin=0, vmax=max(float(head.max()), 0.15))
        axis.set_title(name, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[1, 0].set_ylabel("query")
    axes[1, 0].set_xlabel("key")
    figure.tight_layout()
    figure.savefig(output, dpi=70)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
