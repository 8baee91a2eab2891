"""What the tasks of `benchmarks/paper/` have in common: a size, a tokenizer of byte pairs, and the methods of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from examples.shared.loop import GroupedBatches
from hf_synthesizer import patch_model

STOCK = "dot_product"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How large a model is, and how long it is trained."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    inner: int = 512
    vocabulary: int = 2048
    max_length: int = 64
    batch_size: int = 8
    learning_rate: float = 1.5e-3
    epochs: int = 1
    rows: int | None = None
    test_rows: int | None = None


QUICK = Size(8, 1, 2, 8, 300, 16, 4, epochs=1, rows=8, test_rows=8)
"""To show that everything works."""


def byte_pairs(path: Path, texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of byte pairs, learnt from the texts once and kept."""
    special = ["<pad>", "</s>", "<unk>", "<mask>", "<s>"]
    if not path.exists():
        learnt = Tokenizer(models.BPE())
        learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        learnt.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        learnt.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
        learnt.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        path.parent.mkdir(parents=True, exist_ok=True)
        learnt.save(str(path))
    names = dict(zip(("pad_token", "eos_token", "unk_token", "mask_token", "bos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **names)


class Task(ABC):
    """One task: `rows` to train on, `collate`, `start` and `judge`."""

    score = ""
    size = Size()

    def __init__(self, data: Path, work: Path, weights: Path | None, quick: bool):
        self.data, self.work, self.weights = data, work / ("quick" if quick else "full"), weights
        self.size = QUICK if quick else self.size
        self.tokenizer: Any
        self.rows: Rows = []
        self.prepare()
        self.rows = self.rows[: self.size.rows]

    def batches(self, seed: int) -> GroupedBatches:
        return GroupedBatches(self.rows, self.size.batch_size, self.collate, seed=seed)

    def start(self, variant: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model, whose logits are fresh, and what is to be said of it; stock has the attention that trains fastest."""
        model = self.build()
        if variant != STOCK:
            patch_model(model, variant, max_length=self.size.max_length)
        else:
            model.set_attn_implementation("eager")
        return model, {}

    def make_tokenizer(self, name: str, texts: list[str]) -> Any:
        """One of byte pairs, learnt from the texts."""
        return byte_pairs(self.work / f"{name}-{self.size.vocabulary}.json", texts, self.size.vocabulary)

    @abstractmethod
    def prepare(self) -> None:
        """Read `rows` and `test`, and make the tokenizer."""

    @abstractmethod
    def build(self) -> PreTrainedModel:
        """The stock model that a run starts from."""

    @abstractmethod
    def collate(self, rows: Rows) -> dict[str, Any]:
        """A batch with labels."""

    @abstractmethod
    def judge(self, model: PreTrainedModel) -> dict[str, float]:
        """The metrics on `test`; `score` names the one that counts."""


class Pretrained(Task):
    """A task whose model and tokenizer are read from `folder` of the weights."""

    folder = "flan-t5-small"
    reads: Any = AutoModelForSeq2SeqLM

    @property
    def source(self) -> Path:
        if self.weights is None:
            raise SystemExit(
                f"{self.folder} is missing: --weights FOLDER (benchmarks/pretrained/fetch_weights.py makes it)."
            )
        return self.weights / self.folder

    def make_tokenizer(self, name: str, texts: list[str]) -> Any:
        return AutoTokenizer.from_pretrained(self.source)

    def build(self) -> PreTrainedModel:
        return self.reads.from_pretrained(self.source)
