#!/usr/bin/env python
"""Convert a pretrained decoder to Synthesizer attention and train it to reply, with Trainer.

    python examples/run_dialogue.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name knkarthick/dialogsum \\
        --variant random+dot_product --do_train --do_eval --output_dir outputs/dialogue

History and reply are one sequence. The loss counts the reply alone. The metrics are the perplexity of the reply, and BLEU-1
and ROUGE-L of generated replies.

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
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_synthesizer import patch_model, patch_report, transfer_attention
from hf_synthesizer.checkpoints.resuming import train_from
from hf_synthesizer.errors import DataError, InvalidConfigError
from shared import model as models
from shared.command_line import parse, run_script
from shared.conversion import ConversionArguments
from shared.files import FileArguments, first, load_splits, require_splits
from shared.generated import generate_replies, reply_scores
from shared.perplexity import IGNORED, perplexity, summing
from shared.training import checkpoint_to_go_on_from, evaluate, write_lines

logger = logging.get_logger(__name__)

DIALOGUES = ("dialogue", "dialog", "messages", "utterances")
"""What a column of whole dialogues is usually called."""


@dataclass
class DialogueArguments(FileArguments):
    """The flags of the data, and the lengths."""

    dialogue_column: str | None = field(
        default=None,
        metadata={
            "help": "The column of whole dialogues (a list of turns, or one a line), where each turn is a reply."
        },
    )
    history_column: str = field(
        default="history", metadata={"help": "Without such a column: the column of the turns before."}
    )
    reply_column: str = field(default="reply", metadata={"help": "Without such a column: the column of the reply."})
    max_length: int = field(
        default=256,
        metadata={"help": "The maximum number of tokens of history and reply: the synthesizers' positions."},
    )
    max_reply_length: int = field(default=64, metadata={"help": "The number of these tokens for the reply."})


@dataclass
class DialogueTrainingArguments(TrainingArguments):
    """The flags of Trainer, and of generation."""

    generation_num_beams: int = field(
        default=1, metadata={"help": "The number of beams for generation.", "aliases": ["--num_beams"]}
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data, conversion, training = parse(
        (models.TextModelArguments, DialogueArguments, ConversionArguments, DialogueTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    conversion.require_weights(model_arguments.model_name_or_path)
    set_seed(training.seed)

    # Dialogues, as rows of a history and a reply.
    splits = load_splits(data)
    require_splits(splits, training)
    rows = {split: exchanges_of(split, found, data) for split, found in splits.items()}
    tokenizer = models.load_tokenizer(model_arguments)

    # The model is patched, and the stock model teaches the new attention.
    model = models.load_text_model(model_arguments, AutoModelForCausalLM, tokenizer).to(training.device)
    models.require_causal(model)
    models.require_positions(model, data.max_length, "--max_length")
    encoded = {split: encode(found, tokenizer, data) for split, found in rows.items()}
    collate = DataCollatorForSeq2Seq(tokenizer)
    teacher = models.load_teacher(conversion.teacher, AutoModelForCausalLM, training.device, model_arguments)
    checkpoint = checkpoint_to_go_on_from(training, model, conversion.variant)
    if conversion.variant is not None:
        stock = copy.deepcopy(model) if teacher is None else teacher
        autocast = torch.bfloat16 if training.bf16 else None
        some_rows = encoded.get("train", next(iter(encoded.values()))).remove_columns(["history", "reply"])
        batches = conversion.batches(some_rows, collate, training.seed)
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
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train") if training.do_train else None,
        eval_dataset=encoded.get("validation"),
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=summing(causal=True),
        processing_class=tokenizer,
        data_collator=collate,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train_from(trainer, checkpoint)
        # The config.json says what was swapped. AutoModel loads the model after `import hf_synthesizer`.
        trainer.save_model()
    for split, prefix, wanted in (("validation", "eval", training.do_eval), ("test", "predict", training.do_predict)):
        if not wanted:
            continue
        replies = generate_replies(
            trainer.accelerator,
            model,
            encoded[split],
            tokenizer,
            max_reply_length=data.max_reply_length,
            batch_size=training.per_device_eval_batch_size,
            num_beams=training.generation_num_beams,
            do_sample=False,
        )
        scores = reply_scores(replies, encoded[split]["reply"])
        also = {f"{prefix}_{name}": value for name, value in scores.items()}
        metrics |= evaluate(trainer, encoded[split], prefix, also)
        write_lines(trainer, f"replies_{split}.txt", replies)
    if training.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks="text-generation")
    return metrics


def exchanges_of(split: str, rows: Dataset, arguments: DialogueArguments) -> Dataset:
    """Rows of `reply` and `history`: each turn, and the turns before it.

    Raises:
        DataError: for a column that is missing or holds no turns.
    """
    named = [arguments.dialogue_column] if arguments.dialogue_column else DIALOGUES
    whole = next((name for name in named if name in rows.column_names), None)
    pair = (arguments.history_column, arguments.reply_column)
    if whole is None and (arguments.dialogue_column or not set(pair) <= set(rows.column_names)):
        wanted = arguments.dialogue_column or f"{' and '.join(pair)}, or dialogue"
        raise DataError(f"The {split} data has no column {wanted}: the columns are {', '.join(rows.column_names)}.")
    found: dict[str, list[Any]] = {"history": [], "reply": []}
    for number, row in enumerate(rows):
        if whole is None:
            turns = [*_turns(split, number, row[pair[0]]), *_turns(split, number, [row[pair[1]]])]
            starts = range(len(turns) - 1, len(turns))
        else:
            turns = _turns(split, number, row[whole])
            starts = range(1, len(turns))
        for place in starts:
            found["history"].append(turns[:place])
            found["reply"].append(turns[place])
    if not found["reply"]:
        raise DataError(f"No dialogue of the {split} data has a second turn: there is no reply to learn.")
    return first(Dataset.from_dict(found), arguments.limit(split))


def _turns(split: str, number: int, value: Any) -> list[str]:
    """The turns of a dialogue, which is a text with a turn on each line, a list of texts, or a list of messages with `content`."""
    turns = value.splitlines() if isinstance(value, str) else list(value or [])
    texts: list[Any] = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"Row {number} of the {split} data has no text in one of its turns: found {value!r}.")
    return texts


def encode(rows: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: DialogueArguments) -> Dataset:
    """Rows of input_ids, attention_mask and labels. Only the reply has labels. Each turn ends with the end-of-text token.

    A history that is too long is truncated at its beginning.

    Raises:
        InvalidConfigError: for lengths that leave no room for the reply, or a tokenizer without an end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise InvalidConfigError("A dialogue needs a tokenizer with an end-of-text token, and this one has none.")
    if not 0 < arguments.max_reply_length < arguments.max_length:
        raise InvalidConfigError(
            f"--max_reply_length {arguments.max_reply_length} has to leave room for a history within --max_length "
            f"{arguments.max_length}."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = min(tokenizer.model_max_length, arguments.max_length)
    room = arguments.max_length - arguments.max_reply_length

    def make(row: dict[str, Any]) -> dict[str, list[int]]:
        history = [token for turn in row["history"] for token in _turn(tokenizer, turn)][-room:]
        reply = _turn(tokenizer, row["reply"])[: arguments.max_reply_length]
        labels = [IGNORED] * len(history) + reply
        return {"input_ids": history + reply, "attention_mask": [1] * len(labels), "labels": labels}

    return rows.map(make, desc="tokenize", load_from_cache_file=False, num_proc=arguments.preprocessing_num_workers)


def _turn(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens = tokenizer(text.strip(), add_special_tokens=False, verbose=False)["input_ids"]
    return [*tokens, tokenizer.eos_token_id]


if __name__ == "__main__":
    run_script(main)
