"""The tasks of benchmarks/paper.py: what is read, which model starts, how it is judged.

Three models start from scratch, with a vocabulary of byte pairs that is learnt from the training text: GPT-2 for language
modelling, BERT for masked language modelling, Marian for German–English translation. FLAN-T5-small is converted, for summaries.

The sizes are what one thread carries when 88 runs have to end in an hour: a `Size` says how many rows of the training set are
read, and how many of the test set are judged. Both are the first ones of their files, the same for every variant and seed. The
three `_long` tasks see all rows, six to eight times as many steps, so that it can be told what more training changes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertForMaskedLM,
    DataCollatorForSeq2Seq,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from examples.shared.files import read_parallel
from examples.shared.generated import summary_scores, translation_scores
from examples.shared.loop import GroupedBatches, autocast
from examples.shared.masking import masker
from examples.shared.perplexity import perplexity_of, sums
from hf_synthesizer import patch_model, transfer_attention

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
            raise SystemExit(f"{self.folder} is missing: --weights FOLDER (benchmarks/fetch_weights.py makes it).")
        return self.weights / self.folder

    def make_tokenizer(self, name: str, texts: list[str]) -> Any:
        return AutoTokenizer.from_pretrained(self.source)

    def build(self) -> PreTrainedModel:
        return self.reads.from_pretrained(self.source)


class LanguageModel(Task):
    """WikiText-2 in blocks of as many tokens as the model has positions, each block once."""

    score, causal = "perplexity", True
    size = Size(vocabulary=512, learning_rate=2e-3, rows=10000, test_rows=1000)
    architecture: type[PreTrainedModel] = GPT2LMHeadModel

    def prepare(self) -> None:
        texts = {split: self.data / "lm" / f"wikitext-2-raw.{split}.txt" for split in ("train", "test")}
        lines = {split: path.read_text(encoding="utf-8").splitlines(keepends=True) for split, path in texts.items()}
        self.tokenizer = self.make_tokenizer("wikitext", lines["train"])
        self.rows, self.test = self.blocks(lines["train"]), self.blocks(lines["test"])[: self.size.test_rows]
        words = sum(len(line.split()) for line in lines["test"])
        self.tokens_a_word = len(self.blocks(lines["test"])) * self.size.max_length / words

    def blocks(self, lines: list[str]) -> Rows:
        found = self.tokenizer(lines, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        tokens = [token for line in found for token in line]
        length = self.size.max_length
        return [{"input_ids": tokens[start : start + length]} for start in range(0, len(tokens) - length + 1, length)]

    def build(self) -> PreTrainedModel:
        size = self.size
        kind: Any = self.architecture.config_class
        return self.architecture(
            kind(
                vocab_size=size.vocabulary,
                max_position_embeddings=size.max_length,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                **self.names_of_its_own(),
            )
        )

    def names_of_its_own(self) -> dict[str, Any]:
        """What this architecture calls the width between its two products, special tokens and the dropouts, which are off."""
        quiet = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return {"n_inner": self.size.inner, "bos_token_id": 4, "eos_token_id": 1, **quiet}

    def collate(self, rows: Rows) -> dict[str, Any]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    @torch.no_grad()
    def judge(self, model: PreTrainedModel) -> dict[str, float]:
        model.eval()
        found = []
        for start in range(0, len(self.test), self.size.batch_size):
            batch = self.hidden(self.test[start : start + self.size.batch_size], start)
            labels = batch.pop("labels")
            with autocast(model):
                logits = model(**batch).logits
            found.append(sums(logits, labels, causal=self.causal).numpy())
        return self.also(perplexity_of(np.concatenate(found)))

    def hidden(self, rows: Rows, place: int) -> dict[str, Any]:
        return self.collate(rows)

    def also(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "word_perplexity": metrics["perplexity"] ** self.tokens_a_word}


class LongLanguageModel(LanguageModel):
    """The same, on all of the text."""

    size = replace(LanguageModel.size, rows=None)


class MaskedLanguageModel(LanguageModel):
    """The same text, 15 % of it to be guessed, in blocks so short that a small model leaves the words' frequencies behind; the test's
    masks are always the same."""

    causal = False
    size = Size(vocabulary=512, max_length=16, batch_size=32, learning_rate=2e-3, rows=48000, test_rows=8000)
    architecture = BertForMaskedLM

    def names_of_its_own(self) -> dict[str, Any]:
        quiet = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
        return {
            "intermediate_size": self.size.inner,
            "initializer_range": self.size.width**-0.5,  # with BERT's own, so narrow a model does not begin to learn
            "pad_token_id": 0,
            **quiet,
        }

    def collate(self, rows: Rows) -> dict[str, Any]:
        return masker(self.tokenizer, 0.15)(super().collate(rows), None)

    def hidden(self, rows: Rows, place: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(place)
        return masker(self.tokenizer, 0.15)(super().collate(rows), generator)

    def also(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


class LongMaskedLanguageModel(MaskedLanguageModel):
    """The same, on all of the text."""

    size = replace(MaskedLanguageModel.size, rows=None)


class TextToText(Task):
    """Pairs, generated greedily and scored as they are."""

    longest = 60
    prefix = ""

    def pad(self, rows: Rows, model: Any = None) -> dict[str, Any]:
        return dict(DataCollatorForSeq2Seq(self.tokenizer, model=model)(rows))

    def collate(self, rows: Rows) -> dict[str, Any]:
        return self.pad([{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in rows])

    def encode(self, sources: list[str], targets: list[str]) -> Rows:
        room = min(self.longest, self.size.max_length)
        found = self.tokenizer(sources, truncation=True, max_length=self.size.max_length)
        labels = self.tokenizer(text_target=targets, truncation=True, max_length=room)["input_ids"]
        columns = {**{name: found[name] for name in ("input_ids", "attention_mask")}, "labels": labels}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, rows: Rows) -> list[str]:
        """In the order of the rows; those of about the same length go together."""
        model.eval()
        room = min(self.longest, self.size.max_length)
        texts: dict[int, str] = {}
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]["input_ids"]))
        for start in range(0, len(order), 50):
            numbers = order[start : start + 50]
            inputs = self.pad([{name: rows[n][name] for name in ("input_ids", "attention_mask")} for n in numbers])
            inputs = {name: value for name, value in inputs.items() if value is not None}
            with autocast(model):
                tokens = model.generate(**inputs, max_length=room, num_beams=1, do_sample=False)
            texts |= dict(zip(numbers, self.tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True))
        return [texts[number].strip() for number in range(len(rows))]


class Translation(TextToText):
    """Multi30k, German to English; BLEU on test 2016."""

    score = "bleu"
    size = Size(inner=256, batch_size=16, rows=15000, test_rows=500)

    def prepare(self) -> None:
        files = {"train": "multi30k.train", "test": "multi30k.test_2016_flickr"}
        pairs = {split: read_parallel(self.data / "mt" / name, ("de", "en"))[:] for split, name in files.items()}
        sides = {s: [[row[side] for row in pairs[s]["translation"]] for side in ("de", "en")] for s in files}
        self.tokenizer = self.make_tokenizer("multi30k", [text for side in sides["train"] for text in side])
        read = {split: ([self.prefix + text for text in de], en) for split, (de, en) in sides.items()}
        self.rows, self.test = (self.encode(*read[split]) for split in files)
        self.test = self.test[: self.size.test_rows]
        self.wanted = sides["test"][1][: self.size.test_rows]

    def build(self) -> PreTrainedModel:
        size = self.size
        half = {"layers": size.layers, "attention_heads": size.heads, "ffn_dim": size.inner}
        return MarianMTModel(
            MarianConfig(
                vocab_size=size.vocabulary,
                d_model=size.width,
                max_position_embeddings=size.max_length,
                attention_dropout=0.0,
                dropout=0.0,
                activation_function="relu",
                scale_embedding=True,  # else positions drown the words
                init_std=size.width**-0.5,
                pad_token_id=0,
                eos_token_id=1,
                forced_eos_token_id=1,
                decoder_start_token_id=0,
                **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in half.items()},
            )
        )

    def judge(self, model: PreTrainedModel) -> dict[str, float]:
        return translation_scores(self.generate(model, self.test), self.wanted)


class LongTranslation(Translation):
    """The same, on all pairs, three times each."""

    size = replace(Translation.size, rows=None, epochs=3)


class Summarization(Pretrained, TextToText):
    """DialogSum: dialogues of its dev split to train on, those of its test split, with three summaries each, to judge."""

    score = "rougeL"
    size = Size(max_length=256, learning_rate=5e-4, epochs=2, test_rows=200)
    longest = 48
    prefix = "Summarize the dialogue: "

    def prepare(self) -> None:
        self.tokenizer = self.make_tokenizer("dialogsum", [])
        rows = {}
        for split in ("dev", "test"):
            path = self.data / "summ" / f"dialogsum.{split}.jsonl"
            rows[split] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self.rows = self.encode(self.texts(rows["dev"]), [row["summary"] for row in rows["dev"]])
        judged = rows["test"][: self.size.test_rows]
        self.test = self.encode(self.texts(judged), [row["summary1"] for row in judged])
        self.wanted = [[row[f"summary{number}"] for row in judged] for number in (1, 2, 3)]

    def texts(self, rows: Rows) -> list[str]:
        return [self.prefix + row["dialogue"] for row in rows]

    def start(self, variant: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The pretrained model, converted in closed form: nothing is trained before the fine-tuning."""
        model, facts = super().start(variant)
        if variant != STOCK:
            report = transfer_attention(model, self.build(), self.batches(0), steps=(0, 0), progress=False)
            facts = {"error_after_closed_form": report.error_after}
        return model, {**facts, "before_finetuning": self.judge(model)}

    def judge(self, model: PreTrainedModel) -> dict[str, float]:
        found = self.generate(model, self.test)
        each = [summary_scores(found, wanted) for wanted in self.wanted]
        return {name: sum(scores[name] for scores in each) / len(each) for name in each[0]}


TASKS: dict[str, Callable[..., Task]] = {
    "clm": LanguageModel,
    "translation": Translation,
    "mlm": MaskedLanguageModel,
    "summarization": Summarization,
    "clm_long": LongLanguageModel,
    "mlm_long": LongMaskedLanguageModel,
    "translation_long": LongTranslation,
}
