"""What a decoder writes, judged: its continuations by the stock model, and whether it finds a passkey in a long text."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, set_seed

TOKENS = 64
"""Of a continuation."""
TOGETHER = 8
"""Continuations that are sampled together."""
QUESTION = "\nThe pass key is"


@torch.no_grad()
def judge_continuations(
    model: PreTrainedModel, stock: PreTrainedModel, rows: list[dict[str, Any]], number: int, prompt: int
) -> dict[str, float]:
    """Continuations that the model samples from the first `prompt` tokens of rows, with the same seed for all models.

    Returns:
        `continuation_perplexity`: of them under the stock model; `repeated`: the share of their 4-grams that came before in the
        same continuation.
    """
    set_seed(0)
    losses, repeated, grams = 0.0, 0, 0
    rows = (rows * -(-number // len(rows)))[:number]  # rows come twice if there are fewer
    tokens = 0
    for start in range(0, number, TOGETHER):
        ids = torch.tensor([row["input_ids"][:prompt] for row in rows[start : start + TOGETHER]])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=True,
            temperature=1.0,
            top_p=0.95,
            top_k=0,
            pad_token_id=0,
        )
        logits = stock(written, logits_to_keep=TOKENS + 1).logits[:, :-1].float()
        losses += functional.cross_entropy(
            logits.flatten(0, 1), written[:, -TOKENS:].flatten(), reduction="sum"
        ).item()
        tokens += TOKENS * len(written)
        for text in written[:, -TOKENS:].tolist():
            found = [tuple(text[place : place + 4]) for place in range(TOKENS - 3)]
            repeated += len(found) - len(set(found))
            grams += len(found)
    return {
        "continuation_perplexity": float(torch.tensor(losses / tokens).exp()),
        "repeated": repeated / grams,
        "continuations": number,
    }


@torch.no_grad()
def judge_passkeys(
    model: PreTrainedModel, tokenizer: Any, rows: list[dict[str, Any]], number: int, length: int
) -> dict[str, float]:
    """A key of five digits is told somewhere in a text of `length` tokens, and asked for at its end.

    Returns:
        `passkeys_found`: the share of keys that the model continues with, greedily.
    """
    numbers, found = random.Random(0), 0
    text = [
        token for row in rows[: 1 + (number + 8) * length // len(rows[0]["input_ids"])] for token in row["input_ids"]
    ]
    question = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    for trial in range(number):
        key = f" {numbers.randint(10_000, 99_999)}"
        told = tokenizer(f"\nThe pass key is{key}. Remember it.{key} is the pass key.\n", add_special_tokens=False)
        around = text[trial * length : (trial + 1) * length][: max(length - len(told["input_ids"]) - len(question), 0)]
        place = numbers.randrange(len(around) + 1)
        ids = torch.tensor([around[:place] + told["input_ids"] + around[place:] + question])
        wanted = tokenizer(key, add_special_tokens=False)["input_ids"]
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(wanted), do_sample=False, pad_token_id=0
        )
        found += written[0, ids.shape[1] :].tolist() == wanted
    return {"passkeys_found": found / number, "passkeys": number}
