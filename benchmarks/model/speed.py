"""Times whole models with random weights: encoders of BERT-base's and MiniLM's size and a decoder of T5-base's.

    python -m benchmarks.model.speed --lengths 128,512  # all models
    python -m benchmarks.model.speed --models bert-base --modes inference
    python -m benchmarks.model.speed --device cuda      # or mps, xpu: on the GPU that is there

Each variant takes turns with stock SDPA alone, because the tables of twelve layers are large. The decoder reads the ready
states of an encoder of 128 tokens; its cross-attention stays as it is. A step of training is a forward and a backward,
without an optimizer. A ragged batch goes in as a mask of tokens, so that making and reading masks is part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, T5Model

from benchmarks.block.blocks import CHOOSING, STOCK, VARIANTS, fuse, keep
from benchmarks.measurements.grid import (
    FAILURES,
    Cell,
    Measured,
    choices,
    make_quick,
    parser,
    reason,
    require_memory,
    walk,
    with_device,
)
from benchmarks.model.decode import t5_base
from hf_synthesizer import patch_model
from hf_synthesizer.measuring.timing import Spread, interleaved

MODELS = ("bert-base", "minilm", "t5-base decoder")
ENCODER_LENGTH = 128
MINILM = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
ENCODERS: dict[str, dict[str, Any]] = {"bert-base": {}, "minilm": MINILM}
TINY_BERT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64)
TINY_T5 = dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=4, vocab_size=64)
FUSED = ("random (fused)", "factorized_random (fused)", "random+salience (fused)")


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    made = with_device(parser(__doc__, "model.csv", (STOCK, "stock eager", *VARIANTS, *FUSED, *CHOOSING)))
    made.add_argument("--models", type=choices(*MODELS), default=list(MODELS))
    arguments = made.parse_args(argv)
    if arguments.quick:
        make_quick(arguments, [STOCK, "dense"])

    def measure(model: str, cell: Cell, variants: list[str]) -> list[Measured]:
        return measure_cell(model, cell, variants, arguments)

    walk("model", tuple(arguments.models), arguments, measure)


def measure_cell(model: str, cell: Cell, variants: list[str], arguments: Any) -> list[Measured]:
    """Each variant in turn with stock SDPA."""
    stock = build(model, STOCK, cell, arguments.quick)
    stock_run = runner(model, stock, cell)
    measured: list[Measured] = []
    for name in variants:
        try:
            require_memory(estimated_bytes(name, cell), cell.device)
            other = stock if name == STOCK else build(model, name, cell, arguments.quick)
            runs = {STOCK: stock_run} if name == STOCK else {STOCK: stock_run, name: runner(model, other, cell)}

            def forget_gradients(models: tuple[nn.Module, nn.Module] = (stock, other)) -> None:
                for one in models:
                    one.zero_grad(set_to_none=True)

            spreads = interleaved(runs, arguments.repeats, arguments.seconds, before=forget_gradients, wait=cell.wait)
        except FAILURES as error:
            measured.append((name, reason(error), Spread(0.0, 0.0, 0.0, 0)))
            continue
        measured.append((name, spreads[name], spreads[STOCK]))
        del other, runs, forget_gradients
    return measured


def estimated_bytes(name: str, cell: Cell) -> int:
    """About how much a model of twelve layers takes beside stock; generous."""
    needed = (1 << 30) * (2 if cell.train else 1)
    table = 12 * cell.length**2 * cell.torch_dtype.itemsize
    if name.startswith(("random", "fixed_random")):
        needed += 12 * table * (3 if cell.train else 2 if name.endswith("(fused)") else 1)
    if name == "stock eager":
        needed += cell.batch_size * table * (12 * 3 if cell.train else 4)
    if cell.train:
        needed += 12 * 40 * cell.batch_size * cell.length * 768 * cell.torch_dtype.itemsize
    return needed


def build(model: str, name: str, cell: Cell, quick: bool) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "eager" if name == "stock eager" else "sdpa"}
    if model in ENCODERS:
        options |= dict(attention_probs_dropout_prob=cell.dropout, hidden_dropout_prob=0.0)
        options |= TINY_BERT if quick else ENCODERS[model]
        made: Any = BertModel(BertConfig(max_position_embeddings=cell.length, **options), False)
    else:
        tiny = TINY_T5 if quick else {"num_layers": 1}  # the encoder is not used
        made = T5Model(t5_base(n_positions=cell.length, dropout_rate=cell.dropout, **{**options, **tiny}))
    made = made.to(cell.torch_dtype).train(cell.train)
    if not name.startswith("stock "):
        layers = None if model in ENCODERS else {"decoder": True}
        patch_model(made, name.removesuffix(" (fused)"), layers=layers, max_length=cell.length)
    made = made.to(cell.device)
    return fuse(made, cell.train) if name.endswith(" (fused)") else made


def runner(model: str, made: Any, cell: Cell) -> Callable[[], object]:
    """A forward, or a forward and a backward."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(3, made.config.vocab_size, (cell.batch_size, cell.length))}
    if cell.padding == "ragged":
        batch["attention_mask"] = keep(cell.batch_size, cell.length).long()
    batch = {name: tensor.to(cell.device) for name, tensor in batch.items()}
    forward = made
    if model not in ENCODERS:
        width = made.config.d_model
        states = torch.randn(cell.batch_size, min(ENCODER_LENGTH, cell.length), width).to(
            cell.device, cell.torch_dtype
        )
        batch |= {"encoder_hidden_states": states, "use_cache": False}  # type: ignore[dict-item]
        forward = made.decoder

    def infer() -> None:
        with torch.no_grad():
            forward(**batch)

    def train() -> None:
        output = forward(**batch).last_hidden_state
        output.backward(torch.ones_like(output))

    return train if cell.train else infer


if __name__ == "__main__":
    main()
