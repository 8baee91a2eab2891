#!/usr/bin/env python
"""Convert a pretrained encoder-decoder to Synthesizer attention and train it to summarise, with Seq2SeqTrainer.

    python examples/run_summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \\
        --dataset_name knkarthick/dialogsum --max_source_length 512 --variant random+dot_product --do_train --do_eval \\
        --output_dir outputs/summarization
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from datasets import Dataset

from hf_synthesizer.errors import DataError
from hf_synthesizer.tasks.conversion import ConversionArguments
from hf_synthesizer.tasks.files import first, load_splits
from hf_synthesizer.tasks.generated import summary_scores
from hf_synthesizer.tasks.model import TextModelArguments
from hf_synthesizer.tasks.text_to_text import TextToTextArguments, TextToTextTrainingArguments, checked, run
from hf_synthesizer.tasks.training import parse, run_script

TEXTS = ("text", "article", "document", "dialogue")
SUMMARIES = ("summary", "highlights", "summary1")


@dataclass
class SummaryArguments(TextToTextArguments):
    """Which columns."""

    text_column: str | None = field(default=None, metadata={"help": f"The text; one of {', '.join(TEXTS)} if none."})
    summary_column: str | None = field(
        default=None, metadata={"help": f"Its summary; one of {', '.join(SUMMARIES)} if none."}
    )


def pairs_of(split: str, rows: Dataset, data: SummaryArguments) -> Dataset:
    """Texts with their summaries."""
    columns = []
    for flag, named, usual in (("text", data.text_column, TEXTS), ("summary", data.summary_column, SUMMARIES)):
        names = (named,) if named else usual
        found = [name for name in names if name in rows.column_names]
        if not found:
            raise DataError(
                f"The {split} data has no column {' or '.join(names)}: name --{flag}_column; the columns are "
                f"{', '.join(rows.column_names)}."
            )
        columns.append(found[0])
    return checked(split, *(list(rows[column]) for column in columns))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    model, data, conversion, training = parse(
        (TextModelArguments, SummaryArguments, ConversionArguments, TextToTextTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    pairs = {split: pairs_of(split, first(rows, data.limit(split)), data) for split, rows in load_splits(data).items()}
    return run(model, data, conversion, training, pairs, summary_scores)


if __name__ == "__main__":
    run_script(main)
