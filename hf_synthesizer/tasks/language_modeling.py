"""Language models and masked language models: texts cut into blocks, a conversion, a training, perplexity."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging

from ..errors import DataError, InvalidConfigError
from .conversion import AVERAGE_BATCHES, ConversionArguments, require_weights
from .files import FileArguments, Rows, columns_of, first, load_splits, require_splits
from .masking import MaskingTrainer, masker
from .model import TextModelArguments, load_teacher, load_text_model, load_tokenizer, require_causal, require_positions
from .perplexity import perplexity, summing
from .training import convert_before_training, evaluate, train, transfer_batches

logger = logging.get_logger(__name__)


@dataclass
class LanguageModelArguments(FileArguments):
    """Which text, and in blocks of which length."""

    text_column: str | None = field(
        default=None, metadata={"help": "The column of the text; 'text' or the first one."}
    )
    max_length: int = field(
        default=512,
        metadata={
            "help": "How many tokens a block has, and so the number of positions of the synthesizers.",
            "aliases": ["--block_size", "--max_seq_length"],
        },
    )
    streaming: bool = field(default=False, metadata={"help": "Read the data while training; needs --max_steps."})
    validation_split_percentage: int = field(
        default=5,
        metadata={"help": "Where there is no validation data: the share of the training texts that is kept for it."},
    )


@dataclass
class MaskingArguments:
    """What a masked language model is to guess."""

    mlm_probability: float = field(default=0.15, metadata={"help": "The share of the tokens that is masked."})
    line_by_line: bool = field(default=False, metadata={"help": "Each text is a row of its own, cut at --max_length."})


def run(
    model_arguments: TextModelArguments,
    data: LanguageModelArguments,
    conversion: ConversionArguments,
    training: TrainingArguments,
    masking: MaskingArguments | None = None,
) -> dict[str, float]:
    """Load, convert, train and evaluate, as far as the arguments say so; returns the metrics.

    With `masking` the model is a masked language model, else a causal one.

    Raises:
        DataError: for data that is missing or does not fit.
        InvalidConfigError: for arguments that contradict each other, and what `patch_model` and `transfer_attention` raise.
    """
    require_weights(model_arguments.model_name_or_path, conversion)
    if data.streaming and training.do_train and training.max_steps <= 0:
        raise InvalidConfigError("--streaming does not know how many rows there are: say --max_steps.")
    set_seed(training.seed)
    splits = load_splits(data, streaming=data.streaming)
    if training.do_eval and "validation" not in splits and not data.streaming:
        splits |= cut_off(splits.get("train"), data.validation_split_percentage)
    require_splits(splits, training)
    tokenizer = load_tokenizer(model_arguments)
    tokenizer.model_max_length = min(tokenizer.model_max_length, data.max_length)
    if masking is not None and tokenizer.mask_token is None:
        raise InvalidConfigError(
            "A masked language model needs a tokenizer with a mask token, and this one has none: a decoder is for run_clm.py."
        )
    encoded = {
        name: first(encode(name, rows, tokenizer, data, masking), data.limit(name)) for name, rows in splits.items()
    }
    auto_class: Any = AutoModelForCausalLM if masking is None else AutoModelForMaskedLM
    model = load_text_model(model_arguments, auto_class, tokenizer).to(training.device)
    if masking is None:
        require_causal(model)
    require_positions(model, data.max_length, "--max_length")
    collate: Any = default_data_collator
    masked: Any = None
    if masking is not None:
        collate = DataCollatorWithPadding(tokenizer)
        masked = masker(tokenizer, masking.mlm_probability)
    convert_before_training(
        model,
        conversion,
        training,
        max_length=data.max_length,
        dataloader=transfer_batches(
            lambda: rows_for_transfer(encoded, conversion, training.seed),
            conversion,
            collate if masked is None else (lambda rows: masked(dict(collate(rows)), None)),
            training.seed,
        ),
        teacher=load_teacher(conversion.teacher, auto_class, training.device, model_arguments),
    )
    training_rows = encoded.get("train") if training.do_train else None
    if data.streaming and training_rows is not None:
        training_rows = training_rows.shuffle(seed=training.seed, buffer_size=1000)
    make: Any = Trainer if masked is None else partial(MaskingTrainer, masked=masked)
    trainer = make(
        model=model,
        args=training,
        train_dataset=training_rows,
        eval_dataset=encoded.get("validation"),
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=summing(causal=masking is None),
        processing_class=tokenizer,
        data_collator=collate,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer)
    if training.do_eval:
        metrics |= evaluate(trainer, encoded["validation"])
    if training.do_predict:
        metrics |= evaluate(trainer, encoded["test"], "predict")
    if training.push_to_hub:
        trainer.push_to_hub(
            finetuned_from=model_arguments.model_name_or_path or None,
            tasks="text-generation" if masking is None else "fill-mask",
        )
    return metrics


def cut_off(rows: Dataset | None, percentage: int) -> dict[str, Dataset]:
    """The first texts of a training set as `validation`, and the others as `train`; nothing where there is no training set.

    Raises:
        InvalidConfigError: for a share that leaves nothing of one of them.
    """
    if rows is None:
        return {}
    size = len(rows) * percentage // 100
    if not 0 < size < len(rows):
        raise InvalidConfigError(
            f"--validation_split_percentage {percentage} of {len(rows)} training texts leaves no text on one side: name "
            f"--validation_file, or another share."
        )
    logger.warning(f"No validation data is named: the first {size} of {len(rows)} training texts are kept for it.")
    return {"validation": rows.select(range(size)), "train": rows.select(range(size, len(rows)))}


def encode(
    split: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: LanguageModelArguments,
    masking: MaskingArguments | None = None,
) -> Any:
    """The rows as blocks of `max_length` tokens each, or line by line.

    Raises:
        DataError: where there is no text, or less than a block of it.
    """
    columns = columns_of(rows)
    column = data.text_column or ("text" if "text" in columns else columns[0])
    if column not in columns:
        raise DataError(f"The {split} data has no column {column!r}: the columns are {', '.join(columns)}.")
    if not isinstance(next(iter(rows))[column], str):
        raise DataError(f"The column {column!r} of the {split} data holds no text: name --text_column.")
    lines = masking is not None and masking.line_by_line
    make = partial(
        _lines if lines else _blocks,
        column=column,
        tokenizer=tokenizer,
        length=data.max_length,
        labelled=masking is None,
    )
    options: dict[str, Any] = {}
    if not data.streaming:
        options = {"desc": "tokenize", "load_from_cache_file": False, "num_proc": data.preprocessing_num_workers}
    encoded: Any = rows.map(make, batched=True, remove_columns=columns, **options)
    if not any(True for _ in islice(encoded, 1)):
        raise DataError(
            f"The {split} data is less than one block of {data.max_length} tokens: lower --max_length, or name more text."
        )
    return encoded


def _lines(
    rows: dict[str, list], column: str, tokenizer: PreTrainedTokenizerBase, length: int, labelled: bool
) -> dict[str, list]:
    texts = [text for text in rows[column] if text and not text.isspace()]
    return _tokens(texts, tokenizer, truncation=True, max_length=length)


def _blocks(
    rows: dict[str, list], column: str, tokenizer: PreTrainedTokenizerBase, length: int, labelled: bool
) -> dict[str, list]:
    """All texts one after the other, cut into blocks; what is left over at the end goes."""
    encoded = _tokens([text for text in rows[column] if text], tokenizer, verbose=False)
    joined = {name: [token for row in values for token in row] for name, values in encoded.items()}
    total = len(joined["input_ids"]) // length * length
    blocks = {
        name: [values[start : start + length] for start in range(0, total, length)] for name, values in joined.items()
    }
    if labelled:
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
    return blocks


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> dict[str, list]:
    """What the model reads of each text; a tokenizer fails on no texts at all."""
    if not texts:
        return {name: [] for name in tokenizer.model_input_names}
    return dict(tokenizer(texts, **options))


def rows_for_transfer(encoded: dict[str, Any], conversion: ConversionArguments, seed: int) -> list[dict[str, Any]]:
    """As many of the training rows as a conversion looks at."""
    rows = encoded.get("train", next(iter(encoded.values())))
    size = (
        max(conversion.transfer_steps + conversion.transfer_answers, AVERAGE_BATCHES) * conversion.transfer_batch_size
    )
    if isinstance(rows, Dataset):
        rows = rows.shuffle(seed=seed)
    return list(islice(rows, size))
