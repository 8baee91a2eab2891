"""Language modelling on WikiText-2, by GPT-2 from left to right and by BERT with masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    BertForMaskedLM,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from benchmarks.paper.task import Rows, Size, Task
from examples.shared.loop import autocast
from examples.shared.masking import masker
from examples.shared.perplexity import perplexity_of, sums


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
