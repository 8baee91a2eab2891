"""The tasks of benchmarks/pretrained/scores.py: those of benchmarks/paper/scores.py, with models that know them already.

SmolLM2-135M continues WikiText-2; FLAN-T5-small translates Multi30k and summarises DialogSum, each after the prefix that it was
trained with. Rows of the training sets are for costs, closed form and transfer, which look at no label.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import AutoModelForCausalLM

from benchmarks.paper.language_modelling import LanguageModel
from benchmarks.paper.summarization import Summarization
from benchmarks.paper.task import Pretrained, Size, Task
from benchmarks.paper.translation import Translation


class Continuation(Pretrained, LanguageModel):
    """WikiText-2 in windows, the test's first ones judged; perplexity."""

    folder, reads = "smollm2", AutoModelForCausalLM
    size = Size(max_length=256, batch_size=1, rows=1200, test_rows=60)


class PretrainedTranslation(Pretrained, Translation):
    """Multi30k, German to English; BLEU on the first rows of test 2016."""

    prefix = "translate German to English: "
    size = Size(batch_size=8, rows=3200, test_rows=300)


class PretrainedSummarization(Summarization):
    """DialogSum; the mean ROUGE-L against three summaries, on the first dialogues of the test split."""

    size = Size(max_length=256, batch_size=2, rows=None, test_rows=100)


TASKS: dict[str, Callable[..., Task]] = {
    "smollm2": Continuation,
    "smollm2_long": Continuation,
    "translation": PretrainedTranslation,
    "summarization": PretrainedSummarization,
}
