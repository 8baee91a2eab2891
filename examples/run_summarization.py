#!/usr/bin/env python
"""Convert a pretrained encoder-decoder to Synthesizer attention and train it to summarise, with Seq2SeqTrainer.

    python examples/run_summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \\
        --dataset_name knkarthick/dialogsum --max_source_length 512 --variant random+dot_product --do_train --do_eval \\
        --output_dir outputs/summarization

Three places in `main` are ours: `patch_model`, `transfer_attention`, and the saved config.json.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, set_seed
from transformers.utils import logging

from hf_synthesizer import patch_model, patch_report, transfer_attention
from hf_synthesizer.checkpoints.resuming import train_from
from hf_synthesizer.errors import DataError
from shared.command_line import parse, run_script
from shared.conversion import ConversionArguments
from shared.files import first, load_splits, require_splits
from shared.generated import summary_scores
from shared.languages import speak
from shared.model import TextModelArguments, load_teacher, load_text_model, load_tokenizer, require_positions
from shared.text_to_text import (
    TextToTextArguments,
    TextToTextTrainer,
    TextToTextTrainingArguments,
    checked,
    encode,
    longest,
    predict,
)
from shared.training import checkpoint_to_go_on_from, evaluate

logger = logging.get_logger(__name__)

TEXTS = ("text", "article", "document", "dialogue")
SUMMARIES = ("summary", "highlights", "summary1")


@dataclass
class SummaryArguments(TextToTextArguments):
    """The flags of the columns."""

    text_column: str | None = field(
        default=None, metadata={"help": f"The column of the text. Default: one of {', '.join(TEXTS)}."}
    )
    summary_column: str | None = field(
        default=None, metadata={"help": f"The column of the summary. Default: one of {', '.join(SUMMARIES)}."}
    )


def pairs_of(split: str, rows: Dataset, data: SummaryArguments) -> Dataset:
    """Pairs of texts and summaries."""
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
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data, conversion, training = parse(
        (TextModelArguments, SummaryArguments, ConversionArguments, TextToTextTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    pairs = {split: pairs_of(split, first(rows, data.limit(split)), data) for split, rows in load_splits(data).items()}
    conversion.require_weights(model_arguments.model_name_or_path)
    require_splits(pairs, training)
    longest_text, max_length = longest(data, training)
    set_seed(training.seed)

    # The model is patched, and the stock model teaches the new attention. Cross-attention stays stock.
    tokenizer = load_tokenizer(model_arguments)
    tokenizer.padding_side = "right"
    model = load_text_model(model_arguments, AutoModelForSeq2SeqLM, tokenizer).to(training.device)
    require_positions(model, longest_text, "A length of")
    speak(model, tokenizer, None, data.source_prefix)
    encoded = {split: encode(rows, tokenizer, data) for split, rows in pairs.items()}
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    teacher = load_teacher(conversion.teacher, AutoModelForSeq2SeqLM, training.device, model_arguments)
    checkpoint = checkpoint_to_go_on_from(training, model, conversion.variant)
    if conversion.variant is not None:
        stock = copy.deepcopy(model) if teacher is None else teacher
        autocast = torch.bfloat16 if training.bf16 else None
        some_rows = encoded.get("train", next(iter(encoded.values()))).remove_columns("target")
        batches = conversion.batches(some_rows, collate, training.seed)
        with training.main_process_first(desc="transfer"):  # the other processes load the result of the first
            variant, layers = conversion.choose(stock, batches, max_length, autocast)
            patch_model(model, variant, layers=layers, max_length=max_length, **conversion.options)
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
    trainer = TextToTextTrainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train") if training.do_train else None,
        eval_dataset=encoded.get("validation"),
        processing_class=tokenizer,
        data_collator=collate,
        scores=summary_scores,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train_from(trainer, checkpoint)
        # The config.json says what was swapped. AutoModel loads the model after `import hf_synthesizer`.
        trainer.save_model()
    if training.do_eval:
        metrics |= evaluate(trainer, encoded["validation"])
    if training.do_predict:
        metrics |= predict(trainer, encoded["test"])
    if training.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks="summarization")
    return metrics


if __name__ == "__main__":
    run_script(main)
