"""The cache and the speed of a decoder of SmolLM2's size as its context grows, with heads that see a window or distances.

    python -m benchmarks.model.cache_growth  # 1k, 8k and 32k tokens of context; the last takes half an hour on two cores
    python -m benchmarks.model.cache_growth --weights /path/to/smollm2

A plan says what becomes of the groups of heads that share keys, in turn over all layers: bytes and time do not depend on which
groups do what. The context is read in chunks once. Then the models take turns: each decodes `--tokens` tokens, and takes them back.
`cache_mb` is what the cache holds after the context. `prefill_s` is the time that the context took, once.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.measurements.grid import FAILURES, Cell, outcome, parser, reason, undisturbed
from benchmarks.measurements.records import Results, quick_output
from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.layers.caching import bytes_of
from hf_synthesizer.measuring.timing import Spread, interleaved

FIELDS = (
    *("status", "reason", "decoded", "median_ms", "p20_ms", "p80_ms", "rounds", "stock_sdpa_ms", "speedup", "others"),
    *("tokens_per_second", "prefill_s", "cache_mb", "cache_share"),
)
STOCK = "stock sdpa"
PLANS: dict[str, tuple[str, ...]] = {
    "3/4 in windows of 64": ("window", "window", "window", "stock"),
    "all in windows of 64": ("window",),
    "1/2 in windows of 64 and 1/4 relative": ("window", "relative", "window", "stock"),
    "all relative": ("relative",),
}
"""What each group of heads becomes, in turn."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("dot_product", {"window": 64}),
    "relative": ("relative+salience", {}),
}


def smollm2(**changes: Any) -> LlamaConfig:
    """The configuration of SmolLM2-135M."""
    base = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
    more = dict(num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
    return LlamaConfig(**{**base, **more, "attn_implementation": "sdpa", **changes})


def patched(model: Any, plan: tuple[str, ...]) -> Any:
    """The model after a plan."""
    groups = model.config.num_key_value_heads
    shared = model.config.num_attention_heads // groups
    layers: dict[int | str, Any] = {}
    for layer in range(model.config.num_hidden_layers):
        kinds = [plan[(layer * groups + group) % len(plan)] for group in range(groups)]
        configs = []
        for kind in dict.fromkeys(kinds):
            if kind != "stock":
                heads = [group * shared + n for group in range(groups) if kinds[group] == kind for n in range(shared)]
                variant, options = KINDS[kind]
                configs.append(SynthesizerConfig(variant, heads=heads, **options))
        if configs:
            layers[layer] = configs
    return patch_model(model, layers)


class Decoder:
    """A model that has read a context."""

    def __init__(self, model: Any, ids: torch.Tensor, chunk: int):
        self.model = model
        self.ids = ids
        self.cache = DynamicCache()
        began = time.perf_counter()
        with torch.no_grad():
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=self.cache, logits_to_keep=1)
        self.prefill = time.perf_counter() - began

    @property
    def bytes(self) -> int:
        return sum(bytes_of(layer) for layer in self.cache.layers)

    @torch.no_grad()
    def decode(self, tokens: int) -> None:
        """Decode so many tokens, and take them back."""
        token = self.ids[:, -1:]
        for _ in range(tokens):
            token = self.model(token, past_key_values=self.cache).logits[:, -1:].argmax(-1)
        self.cache.crop(-tokens)


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    made = parser(__doc__, "cache_growth.csv", (STOCK, *PLANS))
    made.set_defaults(
        lengths=[1024, 8192, 32768],
        batch_sizes=[1],
        modes=["inference"],
        padding=["none"],
        dtypes=["float32"],
        repeats=5,
        seconds=600,
    )
    made.add_argument("--tokens", type=int, default=32, help="tokens to decode in a round, at most 64")
    made.add_argument("--chunk", type=int, default=512, help="tokens of the context that are read at once")
    made.add_argument(
        "--weights", help="a folder with SmolLM2-135M; random weights without it, which take the same time"
    )
    arguments = made.parse_args(argv)
    if arguments.modes != ["inference"] or arguments.padding != ["none"]:
        sys.exit("Decoding is inference without padding: leave --modes and --padding out.")
    if not 0 < arguments.tokens <= 64:
        sys.exit("A cache can take back 64 tokens: pass --tokens from 1 to 64.")
    small: dict[str, Any] = {}
    if arguments.quick:
        arguments.output = quick_output(arguments.output)
        small = dict(hidden_size=72, intermediate_size=32, num_hidden_layers=2, vocab_size=256)
        arguments.lengths, arguments.tokens, arguments.chunk = [300], 4, 128
        arguments.variants = [STOCK, *list(PLANS)[::2]]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = Results(arguments.output, FIELDS)
    for length in arguments.lengths:
        for batch_size in arguments.batch_sizes:
            for dtype in arguments.dtypes:
                cell = Cell("inference", "none", dtype, 0.0, length, batch_size)
                measure(smollm2(**small), cell, arguments, results)


def measure(config: LlamaConfig, cell: Cell, arguments: Any, results: Results) -> None:
    """All missing plans of a cell and stock, interleaved."""
    model_name = "smollm2" if config.hidden_size == 576 else "tiny llama"
    rows = {name: cell.row("cache_growth", model_name, name) for name in arguments.variants}
    missing = [name for name, row in rows.items() if arguments.force or not results.has(row)]
    if not missing:
        return
    torch.manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (cell.batch_size, cell.length))
    decoders: dict[str, Decoder] = {}
    skipped: dict[str, str] = {}
    names = list(dict.fromkeys([STOCK, *missing]))
    bar = tqdm(total=len(names) + arguments.repeats, unit="step", desc=f"cache of {cell.length} tokens")
    for name in names:
        try:
            decoders[name] = Decoder(made_model(config, name, cell, arguments.weights), ids, arguments.chunk)
        except FAILURES as error:
            skipped[name] = reason(error)
        bar.update()
    if STOCK in skipped:
        sys.exit(f"The stock model cannot run here, and there is nothing to compare with: {skipped[STOCK]}.")
    cache_bytes = {name: decoder.bytes for name, decoder in decoders.items()}
    runs: dict[str, Any] = {name: partial(decoder.decode, arguments.tokens) for name, decoder in decoders.items()}
    spreads, others = undisturbed(
        lambda: interleaved(runs, arguments.repeats, arguments.seconds, advance=bar.update), arguments
    )
    bar.close()
    for name in missing:
        found: Spread | str = skipped[name] if name in skipped else spreads[name]
        row = {**rows[name], **outcome(found, spreads[STOCK]), "others": f"{others:.2f}"}
        row["decoded"] = str(arguments.tokens)
        if isinstance(found, Spread):
            row["tokens_per_second"] = f"{1e3 * arguments.tokens * cell.batch_size / found.median:.2f}"
            row["prefill_s"] = f"{decoders[name].prefill:.3f}"
            row["cache_mb"] = f"{cache_bytes[name] / 1e6:.3f}"
            row["cache_share"] = f"{cache_bytes[name] / cache_bytes[STOCK]:.4f}"
        results.add(row)


def made_model(config: LlamaConfig, name: str, cell: Cell, weights: str | None) -> Any:
    """The model of a line."""
    if weights is None:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM.from_pretrained(weights, attn_implementation="sdpa")
    model = model.to(cell.torch_dtype).eval()
    if name == STOCK:
        return model
    if name not in PLANS:
        raise ValueError(f"{name!r} is no plan. Pass some of: {', '.join((STOCK, *PLANS))}")
    return patched(model, PLANS[name])


if __name__ == "__main__":
    main()
