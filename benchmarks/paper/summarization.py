"""Summaries of dialogues by FLAN-T5-small, which is converted and fine-tuned."""

from __future__ import annotations

import json
from typing import Any

from transformers import (
    PreTrainedModel,
)

from benchmarks.paper.task import STOCK, Pretrained, Rows, Size
from benchmarks.paper.text_to_text import TextToText
from examples.shared.generated import summary_scores
from hf_synthesizer import transfer_attention


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
