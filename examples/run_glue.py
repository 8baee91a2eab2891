#!/usr/bin/env python
"""Convert a pretrained model to Synthesizer attention and fine-tune it on GLUE or SuperGLUE, with Trainer.

    python examples/run_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --variant dense+salience \\
        --transfer_steps 900 --do_train --do_eval --output_dir outputs/mrpc
"""

from __future__ import annotations

import sys

from hf_synthesizer.glue.conversion import ConversionArguments
from hf_synthesizer.glue.data import DataArguments
from hf_synthesizer.glue.model import ModelArguments
from hf_synthesizer.glue.run import GlueTrainingArguments, run
from hf_synthesizer.tasks.training import parse, run_script


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    classes = (ModelArguments, DataArguments, ConversionArguments, GlueTrainingArguments)
    return run(*parse(classes, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    run_script(main)
