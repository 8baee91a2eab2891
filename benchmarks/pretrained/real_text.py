"""Real text for `real_weights.py`: what each model is taught from, and how well it does on text that it was not taught from.

Tasks differ with what a model was trained for: the order of sentence pairs by their likeness (STS-B), the perplexity of
articles (WikiText-2), the loss of translations (Multi30k), the loss of masked tokens of reactions, written as SMILES.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from scipy.stats import spearmanr
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel

Batch = dict[str, torch.Tensor]
SEED = 0


Item = TypeVar("Item")


def batched(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The items, some at a time."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@dataclass(frozen=True)
class Size:
    """How much text: batches to teach from, batches to judge by, and the rows and tokens of a batch."""

    taught: int
    judged: int
    rows: int
    length: int


@dataclass(frozen=True)
class Task:
    """What a model is taught from, and how it is judged: `score(model)`, and whether more of it is better."""

    measure: str
    more_is_better: bool
    taught: list[Batch]
    judged: list[Batch]
    score: Callable[[PreTrainedModel], float]


def likeness(weights: Path, data: Path, size: Size) -> Task:
    """Spearman correlation of the cosine of sentence embeddings (means over tokens) with what people said, in percent."""
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def batches(split: str, count: int) -> tuple[list[Batch], list[float]]:
        rows = [json.loads(line) for line in (data / "glue" / "stsb" / f"{split}.jsonl").read_text().splitlines()]
        pairs = rows[: count * size.rows // 2]
        texts = [text for row in pairs for text in (row["sentence1"], row["sentence2"])]
        made = [
            dict(tokenizer(list(part), padding=True, truncation=True, max_length=size.length, return_tensors="pt"))
            for part in batched(texts, size.rows)
        ]
        return made, [row["label"] for row in pairs]

    taught, _ = batches("train", size.taught)
    judged, labels = batches("validation", size.judged)

    def score(model: PreTrainedModel) -> float:
        pooled = torch.cat([mean_state(model, batch) for batch in judged])
        cosine = functional.cosine_similarity(pooled[::2], pooled[1::2], dim=-1)
        return 100 * float(spearmanr(cosine, labels).statistic)

    return Task("Spearman on STS-B", True, taught, judged, score)


@torch.no_grad()
def mean_state(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """The mean of the last hidden states over the tokens of each row, (B, d)."""
    keep = batch["attention_mask"].unsqueeze(-1)
    return (model(**batch).last_hidden_state * keep).sum(1) / keep.sum(1)


def articles(weights: Path, data: Path, size: Size) -> Task:
    """Perplexity of windows of Wikipedia articles."""
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def batches(split: str, count: int) -> list[Batch]:
        wanted = count * size.rows * size.length
        text = (data / "lm" / f"wikitext-2-raw.{split}.txt").read_text(encoding="utf-8")[: 8 * wanted]
        ids = tokenizer(text, return_tensors="pt").input_ids[0, :wanted]
        windows = ids[: len(ids) // size.length * size.length].view(-1, size.length)
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in windows.split(size.rows)]

    judged = batches("test", size.judged)

    def score(model: PreTrainedModel) -> float:
        return float(torch.tensor(_mean_loss(model, [{**b, "labels": b["input_ids"]} for b in judged])).exp())

    return Task("perplexity on WikiText-2", False, batches("train", size.taught), judged, score)


def translations(weights: Path, data: Path, size: Size) -> Task:
    """Loss of the English of captions, in nats a token, given the German."""
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def batches(split: str, count: int) -> list[Batch]:
        english, german = (
            (data / "mt" / f"multi30k.{split}.{language}").read_text(encoding="utf-8").splitlines()
            for language in ("en", "de")
        )
        return [
            seq2seq([f"translate German to English: {text}" for text, _ in part], [text for _, text in part])
            for part in itertools.islice(batched(list(zip(german, english, strict=True)), size.rows), count)
        ]

    def seq2seq(sources: list[str], targets: list[str]) -> Batch:
        settings: dict[str, Any] = {"padding": True, "truncation": True, "max_length": size.length}
        inputs = tokenizer(sources, return_tensors="pt", **settings)
        labels = tokenizer(targets, return_tensors="pt", **settings)
        kept = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
        return {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask, "labels": kept}

    judged = batches("val", size.judged)
    return Task("loss on Multi30k, German to English", False, batches("train", size.taught), judged, _loss_on(judged))


def reactions(weights: Path, data: Path, size: Size) -> Task:
    """Loss of masked tokens of reactions. The reactions are made up of acids, alcohols and amines; `data` is not read."""
    words = {word: number for number, word in enumerate((weights / "vocab.txt").read_text().splitlines())}
    generator = torch.Generator().manual_seed(SEED)
    made = list(_reactions())
    order = torch.randperm(len(made), generator=generator).tolist()
    rows = [[words.get(token, words["[UNK]"]) for token in SMILES.findall(made[number])] for number in order]
    rows = [[words["[CLS]"], *row[: size.length - 2], words["[SEP]"]] for row in rows]

    def batch(part: Sequence[list[int]]) -> Batch:
        longest = max(map(len, part))
        ids = torch.tensor([row + [words["[PAD]"]] * (longest - len(row)) for row in part])
        keep = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
        return {"input_ids": ids, "attention_mask": keep}

    def masked(whole: Batch) -> Batch:
        ids = whole["input_ids"]
        chosen = torch.rand(ids.shape, generator=generator) < 0.15
        chosen &= (whole["attention_mask"] == 1) & (ids != words["[CLS]"]) & (ids != words["[SEP]"])
        chosen[0, 1] = True
        return {
            "input_ids": ids.masked_fill(chosen, words["[MASK]"]),
            "attention_mask": whole["attention_mask"],
            "labels": ids.masked_fill(~chosen, -100),
        }

    judged, taught = (
        [batch(part) for part in itertools.islice(batched(half, size.rows), count)]
        for half, count in ((rows[: len(rows) // 2], size.judged), (rows[len(rows) // 2 :], size.taught))
    )
    judged = [masked(whole) for whole in judged]
    return Task("loss of masked tokens of reactions", False, taught, judged, _loss_on(judged))


SMILES = re.compile(r"\[[^\]]*\]|Br|Cl|>>|%\d\d|.")
ACYLS = (
    "CC(=O)", "CCC(=O)", "CC(C)C(=O)", "CCCCC(=O)", "O=C(c1ccccc1)", "O=C(c1ccc(Cl)cc1)", "O=C(c1ccc(OC)cc1)",
    "O=C(Cc1ccccc1)", "O=C(c1ccncc1)", "O=C(c1cccs1)", "O=C(C1CCCCC1)", "O=C(c1ccc([N+](=O)[O-])cc1)", "C=CC(=O)",
    "O=C(c1ccc(Br)cc1)", "O=C(C1CC1)", "FC(F)(F)C(=O)",
)  # fmt: skip
OTHERS = (
    "OC", "OCC", "OC(C)C", "OCCCC", "OCc1ccccc1", "Oc1ccccc1", "OCCOC", "OC1CCCCC1", "NC", "NCC", "NCCC", "NC(C)C",
    "Nc1ccccc1", "NCc1ccccc1", "Nc1ccc(F)cc1", "Nc1ccc(C)cc1", "N1CCOCC1", "N1CCCCC1", "NCCO", "Nc1ccccn1", "NC1CCCC1",
    "Nc1ccc(OC)cc1", "NCCN(C)C", "OCCCl", "N(C)Cc1ccccc1", "Nc1cccc(Br)c1",
)  # fmt: skip


def _reactions() -> Iterator[str]:
    """Esters and amides of acids and acid chlorides, as SMILES."""
    for acyl, other, leaving in itertools.product(ACYLS, OTHERS, ("O", "Cl")):
        yield f"{acyl}{leaving}.{other}>>{acyl}{other}"


def _loss_on(batches: list[Batch]) -> Callable[[PreTrainedModel], float]:
    return lambda model: _mean_loss(model, batches)


@torch.no_grad()
def _mean_loss(model: PreTrainedModel, batches: list[Batch]) -> float:
    """The mean over all tokens that have a label."""
    losses = [(float(model(**batch).loss), int((batch["labels"] != -100).sum())) for batch in batches]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
