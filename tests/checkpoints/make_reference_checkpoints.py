"""Write the reference checkpoints that later versions must load to the same logits: one a variant.

    python -m tests.checkpoints.make_reference_checkpoints

Only those that are missing are written. One that exists is never changed: it is what users have on their disks. A new
`format_version` gets a folder of its own beside the old ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_synthesizer import list_variants, patch_model
from hf_synthesizer.models.description import FORMAT_VERSION
from tests.helpers.models import MIXTURES, build, randomize

FOLDER = Path(__file__).parent / "reference_checkpoints"
INPUT_IDS = [[2, 5, 9, 12, 7, 3], [2, 8, 15, 3, 0, 0]]
ATTENTION_MASK = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
SPECS = {
    **{f"bert-{variant}": ("BertForSequenceClassification", variant) for variant in (*list_variants(), *MIXTURES)},
    "bert-hybrid": ("BertForSequenceClassification", {0: "factorized_random"}),
    "t5-hybrid": ("T5ForConditionalGeneration", {"encoder": "dense+salience", "decoder": "random+dot_product"}),
}
TINY = {
    "BertForSequenceClassification": dict(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    ),
    "T5ForConditionalGeneration": dict(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, n_positions=8
    ),
}


def logits(model: PreTrainedModel) -> torch.Tensor:
    """What the checkpoint stands for."""
    inputs = {"input_ids": torch.tensor(INPUT_IDS), "attention_mask": torch.tensor(ATTENTION_MASK)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(INPUT_IDS)[:, :4]
    with torch.no_grad():
        return model.eval()(**inputs).logits


def main() -> None:
    for name, (head, spec) in SPECS.items():
        folder = FOLDER / f"v{FORMAT_VERSION}" / name
        if folder.exists():
            continue
        torch.manual_seed(0)
        model = patch_model(build(head, **TINY[head]), spec)
        randomize(model, std=0.3)
        model.save_pretrained(folder)
        for beside in ("README.md", "modeling_hf_synthesizer.py"):
            (folder / beside).unlink()
        save_file({"logits": logits(model)}, folder / "expected.safetensors")
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(json.dumps({"written": name, "bytes": size}))


if __name__ == "__main__":
    main()
