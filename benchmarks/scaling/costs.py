"""What attention would cost on accelerators, on paper: writes benchmarks/results/scaling.csv.

    python -m benchmarks.scaling.costs          # writes it
    python -m benchmarks.scaling.costs --check  # only says whether it is what this script would write
    python -m benchmarks.report.scaling         # the tables of docs/scaling.md

Models are built from real configurations on the meta device, so that layers have shapes and no numbers; parameters,
key widths and the products behind the logits are read off them. Nothing is run on an accelerator, and no time is measured.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, T5Config, T5EncoderModel

from benchmarks.measurements.records import RESULTS
from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.attend import attend
from hf_synthesizer.logits.forms import KeyBias, Logits, LowRank, Sparse, Static, Tiled

RESULT = RESULTS / "scaling.csv"
LENGTHS = (512, 2048, 8192, 32768, 131072)
BATCHES = (1, 16)
PARALLEL = (1, 8)
STOCK = "stock"
VARIANTS = (
    STOCK,
    "dense",
    "factorized_dense",
    "random",
    "factorized_random",
    "random+salience",
    "random+dot_product",
    "sparse_strided",
)
WIDTH = 2  # bytes of a bfloat16


class Accelerator(NamedTuple):
    """As its maker publishes it: dense bfloat16 products a second, and bytes of memory a second."""

    name: str
    flops: float
    bandwidth: float


ACCELERATORS = (
    Accelerator("A100 SXM 80 GB", 312e12, 2.039e12),
    Accelerator("H100 SXM 80 GB", 989.4e12, 3.35e12),
    Accelerator("RTX 4090", 165.2e12, 1.008e12),
)


@dataclass(frozen=True, eq=False)
class Model:
    """A configuration, and the number of its self-attention layers."""

    name: str
    build: Callable[[Any], nn.Module]
    config: Any
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    causal: bool


MODELS = (
    Model("BERT-base", BertModel, BertConfig(num_hidden_layers=1), 12, 768, 12, 12, 64, False),
    Model(
        "T5-11B encoder",
        T5EncoderModel,
        T5Config(d_model=1024, d_kv=128, d_ff=65536, num_heads=128, num_layers=1),
        24,
        1024,
        128,
        128,
        128,
        False,
    ),
    Model(
        "Llama-70B",
        LlamaModel,
        LlamaConfig(
            hidden_size=8192,
            num_hidden_layers=1,
            num_attention_heads=64,
            num_key_value_heads=8,
            intermediate_size=28672,
            vocab_size=128256,
            max_position_embeddings=max(LENGTHS),
        ),
        80,
        8192,
        64,
        8,
        128,
        True,
    ),
)


@dataclass(frozen=True)
class Part:
    """What one component of the logits costs a layer: fixed, and for each row of the batch."""

    parameters: int
    key_width: int
    flops: float
    flops_fixed: float
    numbers: int
    """Written and read again, a row."""


def is_layer(module: nn.Module) -> bool:
    return hasattr(module, "synthesizer")


def patched(model: Model, variant: str, length: int) -> nn.Module:
    with torch.device("meta"):
        built = model.build(model.config)
    patch_model(built, SynthesizerConfig(variant, max_length=length))
    return next(module for module in built.modules() if is_layer(module))


@cache
def part_of(model: Model, variant: str, length: int) -> Part:
    """One component, from a layer that has nothing else."""
    pairs = length * length / (2 if model.causal else 1)
    if variant in (STOCK, "dot_product"):
        widths = (model.heads + model.groups) * model.head_dim
        return Part(
            parameters=model.hidden * widths,
            key_width=model.groups * model.head_dim,
            flops=2.0 * length * model.hidden * widths + 2 * model.heads * model.head_dim * pairs,
            flops_fixed=0.0,
            numbers=length * widths,
        )
    if variant == "salience":
        return Part(model.hidden * model.heads, model.heads, 2.0 * length * model.hidden * model.heads, 0.0, length)
    synthesizer = patched(model, variant, length).synthesizer
    hidden = torch.empty(1, length, model.hidden, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = synthesizer(hidden)
    return Part(
        parameters=sum(parameter.numel() for parameter in synthesizer.parameters()),
        key_width=synthesizer.key_width * model.heads,
        flops=counter.get_total_flops() + products(logits, model, length, pairs),
        flops_fixed=2.0 * model.heads * logits.keys.shape[-1] * pairs if thin(logits) else 0.0,
        numbers=sum(tensor.numel() for tensor in made(logits)),
    )


def thin(logits: Logits) -> bool:
    return isinstance(logits, Static) and logits.keys is not None


def products(logits: Logits, model: Model, length: int, pairs: float) -> float:
    """Multiply-adds times two that the logits of one row take, where they are products."""
    if isinstance(logits, LowRank):
        return 2 * model.heads * logits.query.shape[-1] * pairs
    if isinstance(logits, Sparse):
        return 2 * model.head_dim * met(model, length)
    return 0.0


def made(logits: Logits) -> list[torch.Tensor]:
    """The tensors of a form that are made anew for each row of the batch."""
    if isinstance(logits, LowRank):
        return [logits.query]
    if isinstance(logits, Tiled):
        return [logits.inner, logits.outer]
    if isinstance(logits, Sparse):
        return [logits.key]
    return [logits.bias] if isinstance(logits, KeyBias) else []


def met(model: Model, length: int) -> float:
    """Pairs that meet under `sparse_strided`, all heads: windows for the first half, strides for the second."""
    stride, half = isqrt(length), model.heads / 2
    return half * length * (2 * stride + 1 + length / stride) / (2 if model.causal else 1)


@dataclass(frozen=True)
class Cost:
    """One attention layer with its four projections (or what takes their place): one forward on one of `parallel` GPUs."""

    model: str
    variant: str
    length: int
    batch: int
    parallel: int
    parameters: int
    cache_bytes: int
    launches: int
    gflops: float
    megabytes: float
    a100_ms: float
    h100_ms: float
    rtx4090_ms: float


def cost(model: Model, variant: str, length: int, batch: int, parallel: int) -> Cost:
    """Heads are spread over the GPUs, the hidden states that go in and out are not; products and reads at full speed."""
    parts = [part_of(model, name, length) for name in variant.split("+")]
    values = model.groups * model.head_dim
    context = model.heads * model.head_dim
    outside = model.hidden * (values + context)  # the projections of values and of the output
    parameters = sum(part.parameters for part in parts)
    pairs = length * length * model.heads / (2 if model.causal else 1)
    if variant == "sparse_strided":
        pairs = met(model, length)
    flops = batch * (2 * length * outside + 2 * model.head_dim * pairs + sum(part.flops for part in parts))
    flops += sum(part.flops_fixed for part in parts)
    numbers = batch * (length * (values + context) + sum(part.numbers for part in parts))
    moved = WIDTH * ((parameters + outside + 2 * numbers) / parallel + 2 * batch * length * model.hidden)
    kept = sum(part.key_width for part in parts) or model.groups  # a key of width 1 stands in where nothing is kept
    times = [1000 * max(flops / parallel / gpu.flops, moved / gpu.bandwidth) for gpu in ACCELERATORS]
    return Cost(
        model.name,
        variant,
        length,
        batch,
        parallel,
        parameters // parallel,
        WIDTH * (values + kept) * model.layers // parallel,
        launches(variant),
        round(flops / parallel / 1e9, 3),
        round(moved / 1e6, 3),
        *(float(f"{time:.4g}") for time in times),
    )


class Launches(TorchDispatchMode):
    """Counts the operations that compute; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and "empty" not in function.name()
        return function(*args, **(kwargs or {}))


@cache
def launches(variant: str) -> int:
    """From hidden states to the attended values, for a short sequence under PyTorch's routes of this library; 512 tokens."""
    if variant == STOCK:
        return 3  # two projections and a fused kernel
    model, length = MODELS[0], 512
    synthesizer = patched(model, variant, length).synthesizer
    with torch.device("meta"):
        hidden = torch.empty(1, length, model.hidden)
        value = torch.empty(1, model.heads, length, model.head_dim)
    with torch.no_grad(), Launches() as counter:
        attend(synthesizer(hidden), value)
    return counter.count


def all_costs() -> list[Cost]:
    return [
        cost(model, variant, length, batch, parallel)
        for model in MODELS
        for length in LENGTHS
        for batch in BATCHES
        for parallel in (PARALLEL if model.heads % 8 == 0 else PARALLEL[:1])
        for variant in VARIANTS
    ]


def as_csv(costs: list[Cost]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([field.name for field in fields(Cost)])
    writer.writerows(astuple(found) for found in costs)
    return out.getvalue()


def main(argv: list[str] | None = None) -> None:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args(argv)
    wanted = as_csv(all_costs())
    if not arguments.check:
        arguments.output.write_text(wanted, encoding="utf-8")
    elif not arguments.output.exists() or arguments.output.read_text(encoding="utf-8") != wanted:
        sys.exit(
            f"{arguments.output.name} is not what python -m benchmarks.scaling.costs makes of the configurations."
        )


if __name__ == "__main__":
    main()
