"""What the paper and its follow-ups report of the same tasks, at their own size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Literature:
    """Figures of the paper's own size, as surveys and follow-ups report them."""

    what: str
    higher_is_better: bool
    figures: dict[str, float]


SURVEYS = "as surveys of the paper report it"
NARANG = "Narang et al. 2021, T5-base"
LITERATURE = {
    "translation": Literature(
        f"WMT English–German, BLEU, {SURVEYS}",
        True,
        {
            "dot_product": 27.67,
            "fixed_random": 23.89,
            "random": 27.27,
            "dense": 27.43,
            "random+dense": 27.68,
            "random+dot_product": 28.47,
        },
    ),
    "clm": Literature(
        f"LM1B, perplexity, {SURVEYS}",
        False,
        {
            "dot_product": 38.21,
            "random": 40.60,
            "dense": 40.88,
            "factorized_random": 42.40,
            "dense+dot_product": 37.27,
            "random+dot_product": 40.05,
        },
    ),
    "mlm": Literature(
        f"C4, loss of masked spans, {NARANG}",
        False,
        {
            "dot_product": 1.838,
            "random": 2.009,
            "dense": 1.962,
            "factorized_random": 1.968,
            "random+dot_product": 1.842,
            "dense+dot_product": 1.840,
        },
    ),
    "summarization": Literature(
        f"XSum, {NARANG}",
        True,
        {
            "random": 10.35,
            "dense": 14.27,
            "factorized_random": 15.39,
            "random+dot_product": 17.04,
            "dense+dot_product": 16.96,
        },
    ),
}
LITERATURE |= {f"{task}_long": LITERATURE[task] for task in ("clm", "mlm", "translation")}
