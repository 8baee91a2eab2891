"""Tasks from text to text: pairs, and greedy generation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
)

from benchmarks.paper.task import Rows, Task
from examples.shared.loop import autocast


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
