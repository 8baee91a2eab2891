#!/usr/bin/env python
"""Train a masked language model with Synthesizer attention, from pretrained weights or from scratch, with Trainer.

    python examples/run_mlm.py --model_name_or_path google-bert/bert-base-uncased --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-raw-v1 --variant dense+salience --transfer_steps 900 --do_train --do_eval \\
        --output_dir outputs/mlm
"""

from __future__ import annotations

import sys

from transformers import TrainingArguments

from hf_synthesizer.tasks.conversion import ConversionArguments
from hf_synthesizer.tasks.language_modeling import LanguageModelArguments, MaskingArguments, run
from hf_synthesizer.tasks.model import TextModelArguments
from hf_synthesizer.tasks.training import parse, run_script


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    classes = (TextModelArguments, LanguageModelArguments, ConversionArguments, TrainingArguments, MaskingArguments)
    return run(*parse(classes, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    run_script(main)
