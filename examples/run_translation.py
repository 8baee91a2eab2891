#!/usr/bin/env python
"""Convert a pretrained encoder-decoder to Synthesizer attention and train it to translate, with Seq2SeqTrainer.

    python examples/run_translation.py --model_name_or_path google-t5/t5-small --source_lang de --target_lang en \\
        --source_prefix "translate German to English: " --dataset_name bentrevett/multi30k --variant random+dot_product \\
        --do_train --do_eval --output_dir outputs/translation
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from hf_synthesizer.errors import DataError
from hf_synthesizer.tasks.conversion import ConversionArguments
from hf_synthesizer.tasks.files import first, load_splits
from hf_synthesizer.tasks.generated import translation_scores
from hf_synthesizer.tasks.model import TextModelArguments
from hf_synthesizer.tasks.text_to_text import TextToTextArguments, TextToTextTrainingArguments, checked, run
from hf_synthesizer.tasks.training import parse, run_script


@dataclass
class TranslationArguments(TextToTextArguments):
    """From which language into which."""

    source_lang: str = field(default="", metadata={"help": "The source's language: de, or de_DE for mBART."})
    target_lang: str = field(default="", metadata={"help": "The target's language."})


def pairs_of(split: str, rows: Dataset, languages: tuple[str, str]) -> Dataset:
    """Pairs from the column `translation`, a dict by language, or from a column a language."""
    columns = rows.column_names
    if "translation" in columns:
        found: list[Any] = rows["translation"]
        if not isinstance(found[0], dict) or not set(languages) <= set(found[0]):
            raise DataError(f"The {split} data has no translation from {' to '.join(languages)}: found {found[0]!r}.")
        return checked(split, *([row[language] for row in found] for language in languages))
    if not set(languages) <= set(columns):
        raise DataError(
            f"The {split} data has neither a column translation nor {' and '.join(languages)}: the columns are "
            f"{', '.join(columns)}."
        )
    return checked(split, *(list(rows[language]) for language in languages))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    model, data, conversion, training = parse(
        (TextModelArguments, TranslationArguments, ConversionArguments, TextToTextTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    if not data.source_lang or not data.target_lang:
        raise DataError("Say what is translated: --source_lang de --target_lang en.")
    spoken = (data.source_lang, data.target_lang)
    languages = tuple(language.partition("_")[0] for language in spoken)  # mBART's de_DE is de in the data
    splits = load_splits(data, languages=languages)
    pairs = {split: pairs_of(split, first(rows, data.limit(split)), languages) for split, rows in splits.items()}
    return run(model, data, conversion, training, pairs, translation_scores, spoken)


if __name__ == "__main__":
    run_script(main)
