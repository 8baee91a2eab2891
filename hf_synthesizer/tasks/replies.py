"""Dialogue with a decoder: history and reply are one sequence, of which the reply is learnt, generated and scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DataError, InvalidConfigError
from .files import FileArguments, first
from .perplexity import IGNORED

DIALOGUES = ("dialogue", "dialog", "messages", "utterances")
"""What a column of whole dialogues is usually called."""


@dataclass
class DialogueArguments(FileArguments):
    """Which dialogues, and how long."""

    dialogue_column: str | None = field(
        default=None,
        metadata={
            "help": "The column of whole dialogues (a list of turns, or one a line), where each turn is a reply."
        },
    )
    history_column: str = field(default="history", metadata={"help": "Without such a column: what was said before."})
    reply_column: str = field(default="reply", metadata={"help": "Without such a column: the reply."})
    max_length: int = field(
        default=256,
        metadata={"help": "Tokens of history and reply, and so the number of positions of the synthesizers."},
    )
    max_reply_length: int = field(default=64, metadata={"help": "How many of these are kept for the reply."})


def exchanges_of(split: str, rows: Dataset, arguments: DialogueArguments) -> Dataset:
    """One row a reply: `history`, the turns before it, and `reply`.

    Raises:
        DataError: where a column is missing, or holds no turns.
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
    """A dialogue's turns: lines of a text, or a list of texts or of messages with `content`."""
    turns = value.splitlines() if isinstance(value, str) else list(value or [])
    texts: list[Any] = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"Row {number} of the {split} data has no text in one of its turns: found {value!r}.")
    return texts


def encode(rows: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: DialogueArguments) -> Dataset:
    """Rows of input_ids, attention_mask and labels, which are those of the reply; each turn ends with the end-of-text token.

    A history that is too long loses its beginning.

    Raises:
        InvalidConfigError: for lengths that leave no room, and a tokenizer without an end-of-text token.
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


def generate_replies(
    accelerator: Accelerator,
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_reply_length: int,
    batch_size: int = 8,
    **settings: Any,
) -> list[str]:
    """What the model replies to each history, in the order of the rows; the processes share the work.

    Args:
        accelerator: knows the other processes.
        model: a decoder.
        rows: as `encode` makes them.
        tokenizer: its tokenizer.
        max_reply_length: how many tokens are generated at most.
        batch_size: histories of a batch, which are padded on the left.
        settings: what else `generate` is to know, such as num_beams.
    """
    model.eval()
    found: list[str] = []
    with accelerator.split_between_processes(list(range(len(rows)))) as numbers:
        for batch in _batches(rows, numbers, batch_size, int(tokenizer.pad_token_id or 0)):
            length = batch["input_ids"].shape[1]
            with torch.no_grad():
                generated = model.generate(  # type: ignore[operator]
                    **{name: tensor.to(model.device) for name, tensor in batch.items()},
                    max_new_tokens=max_reply_length,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    **settings,
                )
            texts = tokenizer.batch_decode(generated[:, length:], skip_special_tokens=True)
            found += [text.strip() for text in texts]
    return gather_object(found)


def _batches(rows: Dataset, numbers: list[int], size: int, padding: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(numbers), size):
        histories = []
        for number in numbers[start : start + size]:
            row = rows[number]
            histories.append(row["input_ids"][: row["labels"].count(IGNORED)])
        length = max(map(len, histories))
        yield {
            "input_ids": torch.tensor([[padding] * (length - len(tokens)) + tokens for tokens in histories]),
            "attention_mask": torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in histories]),
        }
