"""Metrics of generated text, as sacrebleu and rouge_score compute them; neither asks a network."""

from __future__ import annotations

from collections.abc import Sequence

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF


def translation_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """sacreBLEU and chrF of a whole set, 0 to 100."""
    return {
        "bleu": BLEU().corpus_score(list(found), [list(wanted)]).score,
        "chrf": CHRF().corpus_score(list(found), [list(wanted)]).score,
    }


def summary_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum, 0 to 100: the means of F1 with stemmed words; Lsum takes lines as sentences."""
    return _rouge(found, wanted, ["rouge1", "rouge2", "rougeL", "rougeLsum"])


def reply_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """BLEU-1, which counts words and no runs of them, and ROUGE-L, 0 to 100."""
    words = BLEU(max_ngram_order=1).corpus_score(list(found), [list(wanted)])
    return {"bleu1": words.score, **_rouge(found, wanted, ["rougeL"])}


def _rouge(found: Sequence[str], wanted: Sequence[str], kinds: list[str]) -> dict[str, float]:
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(found, wanted, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / max(1, len(scores)) for kind in kinds}
