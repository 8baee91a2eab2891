"""Varies the rows of a task for a transfer. A transfer needs no labels, so it can use rows that are made up.

A student that sees the same few thousand rows in each epoch memorises them. A made-up row has the form of a real one (the
same special tokens, one text or two). Its texts lose tokens, take tokens from texts of other rows, or are cut and joined
with them, so two texts agree more or less. The teacher's attention is the target for such a row too.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Rows = list[dict[str, Any]]
Tokens = list[int]
Part = tuple[bool, Tokens, int]
"""A run of tokens in a row: whether it is text, the tokens, and their token type."""

DROPPED = 0.2
"""The probability with which `_drop_tokens` drops a token."""
REPLACED = (0.15, 0.3, 0.5)
"""The probabilities among which `_replace_tokens` chooses."""
MEASURED_BATCHES = 100
"""The largest number of batches that a transfer's closed form and `suggest_layers` read."""


def vary(
    rows: Sequence[dict[str, Any]],
    size: int,
    special: Collection[int],
    *,
    share: float = 0.75,
    max_length: int = 512,
    seed: int = 0,
) -> Rows:
    """Make `size` rows, from each real row in turn. A `share` of them is made up, and the rest is unchanged.

    Args:
        rows: tokenized, without labels. Rows with several sequences (multiple choice) are only repeated. Other rows come back
            without padding.
        size: the number of rows to make.
        special: ids of the tokens that are no text, such as [SEP] (see `special_ids`).
        share: from 0 to 1.
        max_length: the maximum length of a made-up row. The longest text is truncated.
        seed: the same seed makes the same rows.
    """
    rows = list(rows)
    parsed = [_parts(row, frozenset(special)) for row in rows] if is_one_sequence(rows[0]) else []
    texts = [tokens for parts in parsed for is_text, tokens, _ in parts if is_text]
    chance = random.Random(seed)
    varied: Rows = []
    while len(varied) < size:
        for number in chance.sample(range(len(rows)), min(len(rows), size - len(varied))):
            is_varied = bool(texts) and chance.random() < share
            row = rows[number]
            if parsed:
                parts = parsed[number]
                columns = _columns(_truncate(_vary_parts(parts, texts, chance), max_length) if is_varied else parts)
                row = {name: columns[name] for name in row}
            varied.append(row)
    return varied


def rows_for_transfer(
    rows: Any, size: int, special: Collection[int], max_length: int, seed: int, *, share: float = 0.75
) -> Rows:
    """Make `size` rows without labels from the tokenized rows of a dataset, a `share` of them made up (see `vary`)."""
    rows = rows.shuffle(seed=seed).select(range(min(size, len(rows))))
    rows = rows.remove_columns([name for name in rows.column_names if name == "labels"])
    return vary(list(rows), size, special, share=share, max_length=max_length, seed=seed)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of special tokens that separate texts: all but the unknown and the mask token, which stand for a word."""
    return {*tokenizer.all_special_ids} - {tokenizer.unk_token_id, tokenizer.mask_token_id}


def is_one_sequence(row: dict[str, Any]) -> bool:
    """Whether the columns of a row are lists of tokens, and not one list for each choice."""
    return isinstance(row["input_ids"][0], int)


def _parts(row: dict[str, Any], special: frozenset[int]) -> list[Part]:
    """Split a row into runs of text and of special tokens."""
    parts: list[Part] = []
    types = row.get("token_type_ids", [0] * len(row["input_ids"]))
    for token, kind, is_token in zip(row["input_ids"], types, row["attention_mask"], strict=True):
        if not is_token:
            continue
        is_text = token not in special
        if not parts or parts[-1][0] != is_text or parts[-1][2] != kind:
            parts.append((is_text, [], kind))
        parts[-1][1].append(token)
    return parts


def _vary_parts(parts: list[Part], texts: list[Tokens], chance: random.Random) -> list[Part]:
    """Replace the texts of a row by varied texts."""
    row_texts = [tokens for is_text, tokens, _ in parts if is_text]
    other = chance.choice(texts)
    new = iter(
        _vary_two_texts(row_texts, other, chance) if len(row_texts) > 1 else [_vary_one_text(row_texts, other, chance)]
    )
    return [(is_text, next(new, tokens) if is_text else tokens, kind) for is_text, tokens, kind in parts]


def _vary_one_text(row_texts: list[Tokens], other: Tokens, chance: random.Random) -> Tokens:
    """Vary the text of a row with one text."""
    text = row_texts[0] if row_texts else other
    return chance.choice(
        (
            lambda: _drop_tokens(text, chance),
            lambda: _replace_tokens(text, other, chance),
            lambda: _join_halves(text, other, chance),
        )
    )()


def _vary_two_texts(row_texts: list[Tokens], other: Tokens, chance: random.Random) -> list[Tokens]:
    """Vary two texts of a row, in random order. The results have from almost all words to no word in common."""
    first, second = chance.sample(row_texts, 2)
    return chance.choice(
        (
            lambda: [first, _join_halves(second, other, chance)],
            lambda: [first, _join_halves(first, other, chance)],
            lambda: [first, _replace_tokens(chance.choice((first, second)), other, chance)],
            lambda: [_drop_tokens(first, chance), _drop_tokens(second, chance)],
            lambda: [first, chance.choice((other, _drop_tokens(first, chance)))],
        )
    )()


def _drop_tokens(text: Tokens, chance: random.Random) -> Tokens:
    return [token for token in text if chance.random() >= DROPPED] or text


def _replace_tokens(text: Tokens, other: Tokens, chance: random.Random) -> Tokens:
    replaced = chance.choice(REPLACED)
    return [chance.choice(other) if chance.random() < replaced else token for token in text]


def _join_halves(text: Tokens, other: Tokens, chance: random.Random) -> Tokens:
    """Join the beginning of one text and the end of the other."""
    first, second = chance.sample((text, other), 2)
    return first[: chance.randint(0, len(first))] + second[chance.randint(0, len(second)) :] or text


def _truncate(parts: list[Part], max_length: int) -> list[Part]:
    """Truncate texts to `max_length` tokens in all. Special tokens stay, even if they alone are more."""
    lengths = [len(tokens) if is_text else 0 for is_text, tokens, _ in parts]
    excess = sum(len(tokens) for _, tokens, _ in parts) - max_length
    for _ in range(min(excess, sum(lengths))):
        lengths[lengths.index(max(lengths))] -= 1
    return [
        (is_text, tokens[:length] if is_text else tokens, kind)
        for (is_text, tokens, kind), length in zip(parts, lengths, strict=True)
    ]


def _columns(parts: list[Part]) -> dict[str, list[int]]:
    """Join the parts to the columns that a tokenizer returns."""
    return {
        "input_ids": [token for _, tokens, _ in parts for token in tokens],
        "token_type_ids": [kind for _, tokens, kind in parts for _ in tokens],
        "attention_mask": [1 for _, tokens, _ in parts for _ in tokens],
    }
