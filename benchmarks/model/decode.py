"""Decoding with a model of T5-base's size, with stock and with synthesized self-attention in the decoder.

    python -m benchmarks.model.decode  # 256 tokens, greedy, random weights

Models take turns, a whole `generate` each. `cache_mb` is what the self-attention cache holds at the end; the cache of the
cross-attention, which stays as it is, is left out. `speedup` is stock's time by the line's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.measurements.grid import FAILURES, Cell, outcome, parser, reason, undisturbed
from benchmarks.measurements.records import Results, quick_output
from hf_synthesizer import patch_model
from hf_synthesizer.measuring.timing import Spread, interleaved

FIELDS = (
    *("status", "reason", "prompt", "median_ms", "p20_ms", "p80_ms", "rounds", "stock_sdpa_ms", "speedup", "others"),
    *("tokens_per_second", "cache_mb", "cache_share"),
)
STOCK = "stock sdpa"
VARIANTS = (STOCK, "random", "factorized_random", "dense", "factorized_dense", "random+salience", "dense+salience")


def t5_base(**changes: Any) -> T5Config:
    """The configuration of T5-base."""
    base = dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12, vocab_size=32128)
    return T5Config(
        **{**base, "n_positions": 512, "decoder_start_token_id": 0, "attn_implementation": "sdpa", **changes}
    )


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    made = parser(__doc__, "decode.csv", VARIANTS)
    made.set_defaults(
        lengths=[256],
        batch_sizes=[1],
        modes=["inference"],
        padding=["none"],
        dtypes=["float32"],
        repeats=3,
        seconds=600,
    )
    made.add_argument("--prompt", type=int, default=32, help="tokens that the encoder reads")
    arguments = made.parse_args(argv)
    if arguments.modes != ["inference"] or arguments.padding != ["none"]:
        sys.exit("Decoding is inference without padding: leave --modes and --padding out.")
    small: dict[str, Any] = {}
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        small = dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=2048)
        arguments.lengths, arguments.batch_sizes, arguments.variants = [8], [1], [STOCK, "dense+salience"]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = Results(arguments.output, FIELDS)
    config = t5_base(**small)
    for length in arguments.lengths:
        for batch_size in arguments.batch_sizes:
            for dtype in arguments.dtypes:
                cell = Cell("inference", "none", dtype, 0.0, length, batch_size)
                measure(config, cell, arguments, results)


def measure(config: T5Config, cell: Cell, arguments: Any, results: Results) -> None:
    """All missing variants of a cell and stock, interleaved."""
    rows = {
        name: cell.row("decode", "t5-base" if config.d_model == 768 else "tiny t5", name)
        for name in arguments.variants
    }
    missing = [name for name, row in rows.items() if arguments.force or not results.has(row)]
    if not missing:
        return
    prompt = torch.randint(3, config.vocab_size, (cell.batch_size, arguments.prompt))
    runs: dict[str, Callable[[], object]] = {}
    cache_bytes: dict[str, int] = {}
    skipped: dict[str, str] = {}
    names = list(dict.fromkeys([STOCK, *missing]))
    bar = tqdm(total=len(names) + arguments.repeats, unit="step", desc=f"decode {cell.length} tokens")
    for name in names:
        try:
            generate = decoding(config, name, cell, prompt)
            generate(2)
        except FAILURES as error:
            skipped[name] = reason(error)
        else:
            runs[name] = partial(decode_and_note, generate, cell.length, name, cache_bytes)
        bar.update()
    if STOCK in skipped:
        sys.exit(f"The stock model cannot run here, and there is nothing to compare with: {skipped[STOCK]}.")
    spreads, others = undisturbed(
        lambda: interleaved(runs, arguments.repeats, arguments.seconds, advance=bar.update), arguments
    )
    bar.close()
    for name in missing:
        found: Spread | str = skipped[name] if name in skipped else spreads[name]
        row = {
            **rows[name],
            **outcome(found, spreads[STOCK]),
            "prompt": str(arguments.prompt),
            "others": f"{others:.2f}",
        }
        if isinstance(found, Spread):
            row["tokens_per_second"] = f"{1e3 * cell.length * cell.batch_size / found.median:.2f}"
            row["cache_mb"] = f"{cache_bytes[name] / 1e6:.3f}"
            row["cache_share"] = f"{cache_bytes[name] / cache_bytes[STOCK]:.4f}"
        results.add(row)


def decode_and_note(generate: Callable[[int], int], length: int, name: str, cache_bytes: dict[str, int]) -> None:
    """Decode, and write down how large the cache grew."""
    cache_bytes[name] = generate(length)


def decoding(config: T5Config, name: str, cell: Cell, prompt: torch.Tensor) -> Callable[[int], int]:
    """A function that decodes so many tokens, and gives the bytes of the self-attention cache."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).to(cell.torch_dtype).eval()
    if name != STOCK:
        patch_model(model, name, layers={"decoder": True})

    def generate(length: int) -> int:
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            min_new_tokens=length,
            max_new_tokens=length,
            return_dict_in_generate=True,
        )
        cache = made.past_key_values.self_attention_cache
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    return generate


if __name__ == "__main__":
    main()
