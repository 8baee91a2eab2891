"""The tasks of benchmarks/paper/scores.py: what is read, which model starts, how it is judged.

Three models start from scratch, with a vocabulary of byte pairs that is learnt from the training text: GPT-2 for language
modelling, BERT for masked language modelling, Marian for German–English translation. FLAN-T5-small is converted, for summaries.

The sizes are what one thread carries when 88 runs have to end in an hour: a `Size` says how many rows of the training set are
read, and how many of the test set are judged. Both are the first ones of their files, the same for every variant and seed. The
three `_long` tasks see all rows, six to eight times as many steps, so that it can be told what more training changes.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paper.language_modelling import (
    LanguageModel,
    LongLanguageModel,
    LongMaskedLanguageModel,
    MaskedLanguageModel,
)
from benchmarks.paper.summarization import Summarization
from benchmarks.paper.task import Task
from benchmarks.paper.translation import LongTranslation, Translation

TASKS: dict[str, Callable[..., Task]] = {
    "clm": LanguageModel,
    "translation": Translation,
    "mlm": MaskedLanguageModel,
    "summarization": Summarization,
    "clm_long": LongLanguageModel,
    "mlm_long": LongMaskedLanguageModel,
    "translation_long": LongTranslation,
}
