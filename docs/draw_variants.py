#!/usr/bin/env python
"""Draws the pictures of docs/variants.md: what a pretrained layer looks at, stock and after a short transfer to each variant.

    make demo DEMO_ARGS=--quick            # once: brings the weights and the text
    .venv/bin/python docs/draw_variants.py

MiniLM-L6, whose layers are taught for some steps on movie-review snippets (`examples/shared/snippets.py`); the seed decides the rest.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, set_seed

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples")]


from hf_synthesizer import patch_model, transfer_attention  # noqa: E402
from hf_synthesizer.plots import plot_attention, save  # noqa: E402
from shared import snippets  # noqa: E402

SENTENCE = "Not nearly as bad as the trailer made me fear."
LAYER, HEADS = 2, (0, 3, 6, 9)
LONGEST = 32
STOCK = "stock"
OPTIONS: dict[str, dict[str, Any]] = {
    STOCK: {},
    "random": {},
    "fixed_random": {},
    "factorized_random": {},
    "dense": {},
    "factorized_dense": {},
    "dense+salience": {},
    "random+dot_product": {},
    "sparse_strided": {},
    "sparse_fixed": {},
    "lsh_simple": {"bucket_size": 4},  # so few that a short sentence shows a choice
    "routing": {},
}
"""What is drawn; the four `alsh_` variants look like `lsh_simple`."""


def draw(model_name: str, texts: list[str], folder: Path, steps: int) -> list[Path]:
    """One picture for each variant, `variant-….png`."""
    tokenizer = AutoTokenizer.from_pretrained(model_name, model_max_length=LONGEST)
    teacher = AutoModel.from_pretrained(model_name).eval()
    rows = [tokenizer(text, truncation=True) for text in texts]
    inputs = tokenizer(SENTENCE, truncation=True, return_tensors="pt")
    heads = [head for head in HEADS if head < teacher.config.num_attention_heads]
    layer = min(LAYER, teacher.config.num_hidden_layers - 1)
    paths = []
    for variant, options in OPTIONS.items():
        set_seed(0)
        model = copy.deepcopy(teacher)
        if variant != STOCK:
            patch_model(model, variant, max_length=LONGEST, **options)
            batches = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
            transfer_attention(model, teacher, batches, steps=steps, autocast=torch.bfloat16)
        figure = plot_attention(model, inputs, tokenizer=tokenizer, layers=[layer], heads=heads)
        paths.append(save(figure, folder / f"variant-{variant.replace('+', '-')}.png", dpi=72))
    return paths


def main(argv: list[str] | None = None) -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hub or a folder (default: MiniLM-L6 from the demo's package)")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "outputs" / "demo" / "data", help="where the snippets are put"
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args(argv)
    train, _ = snippets.write_splits(arguments.data)
    texts = [json.loads(line)["sentence"] for line in train.read_text(encoding="utf-8").splitlines()]
    draw(arguments.model or snippets.packaged_model(), texts[:4000], arguments.output, arguments.steps)


if __name__ == "__main__":
    main()
