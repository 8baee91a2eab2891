#!/usr/bin/env python
"""Train a masked language model with Synthesizer attention, from pretrained weights or from scratch, with Trainer.

    python examples/run_mlm.py --model_name_or_path google-bert/bert-base-uncased --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-raw-v1 --variant dense+salience --transfer_steps 900 --do_train --do_eval \\
        --output_dir outputs/mlm

Three places in `main` are ours: `patch_model`, `transfer_attention`, and the saved config.json.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, DataCollatorWithPadding, TrainingArguments, set_seed
from transformers.utils import logging

from hf_synthesizer import patch_model, patch_report, transfer_attention
from hf_synthesizer.checkpoints.resuming import train_from
from hf_synthesizer.errors import InvalidConfigError
from shared.command_line import parse, run_script
from shared.conversion import ConversionArguments
from shared.language_modeling import LanguageModelArguments, encode, load_texts, rows_for_transfer, training_rows
from shared.masking import MaskingTrainer, masker
from shared.model import TextModelArguments, load_teacher, load_text_model, load_tokenizer, require_positions
from shared.perplexity import perplexity, summing
from shared.training import checkpoint_to_go_on_from, evaluate

logger = logging.get_logger(__name__)


@dataclass
class MaskingArguments:
    """The flags of masking."""

    mlm_probability: float = field(default=0.15, metadata={"help": "The share of masked tokens."})
    line_by_line: bool = field(default=False, metadata={"help": "Make each text one row, truncated to --max_length."})


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data, conversion, training, masking = parse(
        (TextModelArguments, LanguageModelArguments, ConversionArguments, TrainingArguments, MaskingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    conversion.require_weights(model_arguments.model_name_or_path)
    set_seed(training.seed)

    # Text, as blocks of tokens, or line by line; some of the tokens are hidden in each step.
    splits = load_texts(data, training)
    tokenizer = load_tokenizer(model_arguments)
    tokenizer.model_max_length = min(tokenizer.model_max_length, data.max_length)
    if tokenizer.mask_token is None:
        raise InvalidConfigError(
            "A masked language model needs a tokenizer with a mask token, and this one has none: a decoder is for run_clm.py."
        )
    encoded = {
        split: encode(split, rows, tokenizer, data, labelled=False, lines=masking.line_by_line)
        for split, rows in splits.items()
    }
    collate = DataCollatorWithPadding(tokenizer)
    masked = masker(tokenizer, masking.mlm_probability)

    # The model is patched, and the stock model teaches the new attention.
    model = load_text_model(model_arguments, AutoModelForMaskedLM, tokenizer).to(training.device)
    require_positions(model, data.max_length, "--max_length")
    teacher = load_teacher(conversion.teacher, AutoModelForMaskedLM, training.device, model_arguments)
    checkpoint = checkpoint_to_go_on_from(training, model, conversion.variant)
    if conversion.variant is not None:
        stock = copy.deepcopy(model) if teacher is None else teacher
        autocast = torch.bfloat16 if training.bf16 else None
        some_rows = rows_for_transfer(encoded, conversion.rows, training.seed)
        batches = conversion.batches(some_rows, lambda rows: masked(dict(collate(rows)), None), training.seed)
        with training.main_process_first(desc="transfer"):  # the other processes load the result of the first
            variant, layers = conversion.choose(stock, batches, data.max_length, autocast)
            patch_model(model, variant, layers=layers, max_length=data.max_length, **conversion.options)
            logger.warning(f"{patch_report(model)}")
            if conversion.transfers:
                report = transfer_attention(
                    model,
                    stock,
                    batches,
                    method=conversion.transfer_method,
                    steps=conversion.stages,
                    autocast=autocast,
                    checkpoint_dir=Path(str(training.output_dir)) / "transfer",
                )
                logger.warning(f"Transfer:\n{report}")
        del stock, teacher  # to free their memory for the training

    # From here on everything is as without hf_synthesizer.
    trainer = MaskingTrainer(
        model=model,
        args=training,
        train_dataset=training_rows(encoded, data, training),
        eval_dataset=encoded.get("validation"),
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=summing(causal=False),
        processing_class=tokenizer,
        data_collator=collate,
        masked=masked,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train_from(trainer, checkpoint)
        # The config.json says what was swapped. AutoModel loads the model after `import hf_synthesizer`.
        trainer.save_model()
    if training.do_eval:
        metrics |= evaluate(trainer, encoded["validation"])
    if training.do_predict:
        metrics |= evaluate(trainer, encoded["test"], "predict")
    if training.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks="fill-mask")
    return metrics


if __name__ == "__main__":
    run_script(main)
