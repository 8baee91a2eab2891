#!/usr/bin/env python
"""Train a causal language model with Synthesizer attention, from pretrained weights or from scratch, with Trainer.

    python examples/run_clm.py --model_name_or_path openai-community/gpt2 --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-raw-v1 --variant random+dot_product --do_train --do_eval --output_dir outputs/clm
    python examples/run_clm.py --model_type gpt2 --config_overrides n_layer=4,n_embd=256,n_head=4 \\
        --tokenizer_name openai-community/gpt2 --train_file train.txt --validation_file valid.txt --variant dense \\
        --do_train --do_eval --output_dir outputs/clm
"""

from __future__ import annotations

import sys

from transformers import TrainingArguments

from hf_synthesizer.tasks.conversion import ConversionArguments
from hf_synthesizer.tasks.language_modeling import LanguageModelArguments, run
from hf_synthesizer.tasks.model import TextModelArguments
from hf_synthesizer.tasks.training import parse, run_script


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    classes = (TextModelArguments, LanguageModelArguments, ConversionArguments, TrainingArguments)
    return run(*parse(classes, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    run_script(main)
