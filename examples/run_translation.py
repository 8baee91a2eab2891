#!/usr/bin/env python
"""Convert a pretrained encoder-decoder to Synthesizer attention and train it to translate, with Seq2SeqTrainer.

    python examples/run_translation.py --model_name_or_path google-t5/t5-small --source_lang de --target_lang en \\
        --source_prefix "translate German to English: " --dataset_name bentrevett/multi30k --variant random+dot_product \\
        --do_train --do_eval --output_dir outputs/translation

Three places in `main` are ours: `patch_model`, `transfer_attention`, and the saved config.json.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from shared.generated import translation_scores
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


@dataclass
class TranslationArguments(TextToTextArguments):
    """The flags of the languages."""

    source_lang: str = field(default="", metadata={"help": "The source's language: de, or de_DE for mBART."})
    target_lang: str = field(default="", metadata={"help": "The target's language."})


def pairs_of(split: str, rows: Dataset, languages: tuple[str, str]) -> Dataset:
    """Pairs of texts, from the column `translation` (a dict by language) or from one column for each language."""
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
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data, conversion, training = parse(
        (TextModelArguments, TranslationArguments, ConversionArguments, TextToTextTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    if not data.source_lang or not data.target_lang:
        raise DataError("Say what is translated: --source_lang de --target_lang en.")
    spoken = (data.source_lang, data.target_lang)
    languages = tuple(language.partition("_")[0] for language in spoken)  # mBART's de_DE is de in the data
    splits = load_splits(data, languages=languages)
    pairs = {split: pairs_of(split, first(rows, data.limit(split)), languages) for split, rows in splits.items()}
    conversion.require_weights(model_arguments.model_name_or_path)
    require_splits(pairs, training)
    longest_text, max_length = longest(data, training)
    set_seed(training.seed)

    # The model is patched, and the stock model teaches the new attention. Cross-attention stays stock.
    tokenizer = load_tokenizer(model_arguments)
    tokenizer.padding_side = "right"
    model = load_text_model(model_arguments, AutoModelForSeq2SeqLM, tokenizer).to(training.device)
    require_positions(model, longest_text, "A length of")
    speak(model, tokenizer, spoken, data.source_prefix)
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
        scores=translation_scores,
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
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks="translation")
    return metrics


if __name__ == "__main__":
    run_script(main)
