"""Rows made up from the rows of a task, for a transfer: it needs no labels, and learns more from rows it has not seen.

A few thousand rows seen again and again are learned by heart. A made-up row has the form of a real one (the same special
tokens, one text or two), and its texts are thinned out, cut, or mixed with those of other rows, so that two texts agree more
or less. What such a row means is for the teacher to say.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Rows = list[dict[str, Any]]
Tokens = list[int]
Part = tuple[bool, Tokens, int]
"""A run of a row: whether it is text, its tokens, and their token type."""

LOST = 0.2
"""The share of its tokens that a thinned text loses."""
REPLACED = (0.15, 0.3, 0.5)
"""The shares of its tokens that a noisy text may take from another one."""
MEASURED_BATCHES = 100
"""How many batches a transfer's closed form and `suggest_layers` look at, at most."""


def vary(
    rows: Sequence[dict[str, Any]],
    size: int,
    special: Collection[int],
    *,
    share: float = 0.75,
    max_length: int = 512,
    seed: int = 0,
) -> Rows:
    """`size` rows, made from each real one in turn; a `share` of them is made up, the rest as it was.

    Args:
        rows: tokenized, without labels. Rows that hold several sequences (multiple choice) are only repeated; all others
            come back without padding.
        size: how many rows come back.
        special: ids of the tokens that are no text, such as [SEP] (see `special_ids`).
        share: from 0 to 1.
        max_length: of a made-up row; its longest text is cut.
        seed: the same seed makes the same rows.
    """
    rows = list(rows)
    parsed = [_parts(row, frozenset(special)) for row in rows] if is_one_sequence(rows[0]) else []
    texts = [tokens for parts in parsed for is_text, tokens, _ in parts if is_text]
    chance = random.Random(seed)
    found: Rows = []
    while len(found) < size:
        for number in chance.sample(range(len(rows)), min(len(rows), size - len(found))):
            made_up = bool(texts) and chance.random() < share
            row = rows[number]
            if parsed:
                parts = parsed[number]
                columns = _columns(_shortened(_made_up(parts, texts, chance), max_length) if made_up else parts)
                row = {name: columns[name] for name in row}
            found.append(row)
    return found


def rows_for_transfer(
    rows: Any, size: int, special: Collection[int], max_length: int, seed: int, *, share: float = 0.75
) -> Rows:
    """`size` rows without labels, most of them made up (see `vary`) from the tokenized rows of a data set."""
    rows = rows.shuffle(seed=seed).select(range(min(size, len(rows))))
    rows = rows.remove_columns([name for name in rows.column_names if name == "labels"])
    return vary(list(rows), size, special, share=share, max_length=max_length, seed=seed)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that frame texts: all special ones but those that stand for a word."""
    return {*tokenizer.all_special_ids} - {tokenizer.unk_token_id, tokenizer.mask_token_id}


def is_one_sequence(row: dict[str, Any]) -> bool:
    """Whether a row's columns are lists of tokens, and not one for each choice."""
    return isinstance(row["input_ids"][0], int)


def _parts(row: dict[str, Any], special: frozenset[int]) -> list[Part]:
    """The runs of text and of special tokens."""
    parts: list[Part] = []
    types = row.get("token_type_ids", [0] * len(row["input_ids"]))
    for token, kind, seen in zip(row["input_ids"], types, row["attention_mask"], strict=True):
        if not seen:
            continue
        is_text = token not in special
        if not parts or parts[-1][0] != is_text or parts[-1][2] != kind:
            parts.append((is_text, [], kind))
        parts[-1][1].append(token)
    return parts


def _made_up(parts: list[Part], texts: list[Tokens], chance: random.Random) -> list[Part]:
    """The same parts with other texts."""
    own = [tokens for is_text, tokens, _ in parts if is_text]
    new = iter(_pair(own, chance.choice(texts), chance) if len(own) > 1 else [_one(own, chance.choice(texts), chance)])
    return [(is_text, next(new, tokens) if is_text else tokens, kind) for is_text, tokens, kind in parts]


def _one(own: list[Tokens], other: Tokens, chance: random.Random) -> Tokens:
    """Another text in place of a single one."""
    text = own[0] if own else other
    return chance.choice(
        (
            lambda: _thinned(text, chance),
            lambda: _noisy(text, other, chance),
            lambda: _crossed(text, other, chance),
        )
    )()


def _pair(own: list[Tokens], other: Tokens, chance: random.Random) -> list[Tokens]:
    """Two other texts in place of two, in either order: from the same but for a few words to nothing in common."""
    first, second = chance.sample(own, 2)
    return chance.choice(
        (
            lambda: [first, _crossed(second, other, chance)],
            lambda: [first, _crossed(first, other, chance)],
            lambda: [first, _noisy(chance.choice((first, second)), other, chance)],
            lambda: [_thinned(first, chance), _thinned(second, chance)],
            lambda: [first, chance.choice((other, _thinned(first, chance)))],
        )
    )()


def _thinned(text: Tokens, chance: random.Random) -> Tokens:
    return [token for token in text if chance.random() >= LOST] or text


def _noisy(text: Tokens, other: Tokens, chance: random.Random) -> Tokens:
    replaced = chance.choice(REPLACED)
    return [chance.choice(other) if chance.random() < replaced else token for token in text]


def _crossed(text: Tokens, other: Tokens, chance: random.Random) -> Tokens:
    """The beginning of one text and the end of the other."""
    first, second = chance.sample((text, other), 2)
    return first[: chance.randint(0, len(first))] + second[chance.randint(0, len(second)) :] or text


def _shortened(parts: list[Part], max_length: int) -> list[Part]:
    """At most `max_length` tokens, if the special ones leave room for that."""
    lengths = [len(tokens) if is_text else 0 for is_text, tokens, _ in parts]
    excess = sum(len(tokens) for _, tokens, _ in parts) - max_length
    for _ in range(min(excess, sum(lengths))):
        lengths[lengths.index(max(lengths))] -= 1
    return [
        (is_text, tokens[:length] if is_text else tokens, kind)
        for (is_text, tokens, kind), length in zip(parts, lengths, strict=True)
    ]


def _columns(parts: list[Part]) -> dict[str, list[int]]:
    """What a tokenizer makes of them."""
    return {
        "input_ids": [token for _, tokens, _ in parts for token in tokens],
        "token_type_ids": [kind for _, tokens, kind in parts for _ in tokens],
        "attention_mask": [1 for _, tokens, _ in parts for _ in tokens],
    }
