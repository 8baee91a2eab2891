"""Masked language modelling with Trainer. Masks are drawn in the training step that uses them.

Trainer's loader is one batch ahead of the step. So masks that a collator draws differ in a resumed run. Here masks are drawn from
the random state that a checkpoint keeps. The masks of an evaluation are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer

from .perplexity import IGNORED

HIDDEN, REPLACED = 0.8, 0.1
"""Shares of the tokens to predict: masked, and replaced by another token. The others stay (as in BERT)."""

Batch = dict[str, Any]


Masked = Callable[[Batch, torch.Generator | None], Batch]


def masker(tokenizer: PreTrainedTokenizerBase, probability: float) -> Masked:
    """Make a function that masks some tokens of a batch with `input_ids` (B, L), and adds their ids as `labels`.

    Special tokens are never masked. The function draws from its generator, or from the random state of the process.

    Args:
        tokenizer: a tokenizer with a mask token.
        probability: the share of masked tokens.
    """
    special = torch.tensor(tokenizer.all_special_ids)
    token: Any = tokenizer.mask_token_id

    def masked(batch: Batch, generator: torch.Generator | None) -> Batch:
        ids = batch["input_ids"].cpu()  # (B, L)
        chances = torch.rand(3, *ids.shape, generator=generator)  # (3, B, L)
        guessed = (chances[0] < probability) & ~torch.isin(ids, special)
        hidden = guessed & (chances[1] < HIDDEN)
        replaced = guessed & ~hidden & (chances[2] < REPLACED / (1 - HIDDEN))
        words = torch.randint(len(tokenizer), ids.shape, generator=generator)
        seen = ids.masked_fill(hidden, token).where(~replaced, words)
        device = batch["input_ids"].device
        return {**batch, "input_ids": seen.to(device), "labels": ids.where(guessed, IGNORED).to(device)}

    return masked


class MaskingTrainer(Trainer):
    """Trainer for a masked language model; `masked` is a `masker`."""

    def __init__(self, *, masked: Masked, **kwargs: Any):
        super().__init__(**kwargs)
        self.masked = masked
        self.evaluation: torch.Generator | None = None

    def training_step(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(model, self.masked(inputs, None), *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation = torch.Generator().manual_seed(self.args.seed + self.args.process_index)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, self.masked(inputs, self.evaluation), *args, **kwargs)
