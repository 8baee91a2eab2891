"""Generate replies with a decoder, and score generated text with sacrebleu and rouge_score. No network is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .perplexity import IGNORED


def translation_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """sacreBLEU and chrF of a whole set, from 0 to 100."""
    return {
        "bleu": BLEU().corpus_score(list(found), [list(wanted)]).score,
        "chrf": CHRF().corpus_score(list(found), [list(wanted)]).score,
    }


def summary_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum, from 0 to 100: the mean F1 of stemmed words. Lsum takes each line as a sentence."""
    return _rouge(found, wanted, ["rouge1", "rouge2", "rougeL", "rougeLsum"])


def reply_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """BLEU-1, which counts single words, and ROUGE-L, from 0 to 100."""
    words = BLEU(max_ngram_order=1).corpus_score(list(found), [list(wanted)])
    return {"bleu1": words.score, **_rouge(found, wanted, ["rougeL"])}


def _rouge(found: Sequence[str], wanted: Sequence[str], kinds: list[str]) -> dict[str, float]:
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(found, wanted, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / max(1, len(scores)) for kind in kinds}


def generate_replies(
    accelerator: Accelerator,
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_reply_length: int,
    batch_size: int = 8,
    **settings: Any,
) -> list[str]:
    """Generate a reply to each history, in the order of the rows. The processes share the work.

    Args:
        accelerator: the accelerator of the training.
        model: a decoder.
        rows: have `input_ids`, and `labels` that are IGNORED for the history.
        tokenizer: its tokenizer.
        max_reply_length: the maximum number of generated tokens.
        batch_size: the number of histories in a batch. They are padded on the left.
        settings: other arguments of `generate`, such as num_beams.
    """
    model.eval()
    found: list[str] = []
    with accelerator.split_between_processes(list(range(len(rows)))) as numbers:
        for batch in _batches(rows, numbers, batch_size, int(tokenizer.pad_token_id or 0)):
            length = batch["input_ids"].shape[1]
            with torch.no_grad():
                generated = model.generate(  # type: ignore[operator]
                    **{name: tensor.to(model.device) for name, tensor in batch.items()},
                    max_new_tokens=max_reply_length,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    **settings,
                )
            texts = tokenizer.batch_decode(generated[:, length:], skip_special_tokens=True)
            found += [text.strip() for text in texts]
    return gather_object(found)


def _batches(rows: Dataset, numbers: list[int], size: int, padding: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(numbers), size):
        histories = []
        for number in numbers[start : start + size]:
            row = rows[number]
            histories.append(row["input_ids"][: row["labels"].count(IGNORED)])
        length = max(map(len, histories))
        yield {
            "input_ids": torch.tensor([[padding] * (length - len(tokens)) + tokens for tokens in histories]),
            "attention_mask": torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in histories]),
        }
