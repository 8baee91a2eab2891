"""The rows that the examples make up for a transfer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_synthesizer.transfer.variation import special_ids, vary

CLS, SEP = 101, 102


def row(*texts: list[int]) -> dict[str, Any]:
    """As BERT's tokenizer makes it."""
    parts = [[CLS, *texts[0], SEP], *([*text, SEP] for text in texts[1:])]
    return {
        "input_ids": [token for part in parts for token in part],
        "token_type_ids": [number for number, part in enumerate(parts) for _ in part],
        "attention_mask": [1] * sum(map(len, parts)),
    }


SINGLE = [row(list(range(10 * n, 10 * n + 4 + n))) for n in range(1, 7)]
PAIRS = [row(list(range(10 * n, 10 * n + 5)), list(range(10 * n + 5, 10 * n + 8 + n % 2))) for n in range(1, 7)]


def texts_of(made: dict[str, Any]) -> list[list[int]]:
    texts: list[list[int]] = [[]]
    for token in made["input_ids"][1:-1]:
        if token == SEP:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


@pytest.mark.parametrize("rows", [SINGLE, PAIRS], ids=["single", "pairs"])
def test_a_made_up_row_has_the_form_of_a_real_one(rows: list[dict[str, Any]]) -> None:
    for made in vary(rows, 200, [CLS, SEP], share=1):
        texts = texts_of(made)
        assert len(texts) == len(texts_of(rows[0])) and all(texts)
        assert made == row(*texts)


@pytest.mark.parametrize("rows", [SINGLE, PAIRS], ids=["single", "pairs"])
def test_most_made_up_rows_are_new_and_made_of_the_real_tokens(rows: list[dict[str, Any]]) -> None:
    made = vary(rows, 200, [CLS, SEP], share=1)
    assert sum(one not in rows for one in made) > 150
    assert len({tuple(one["input_ids"]) for one in made}) > 150
    assert {token for one in made for token in one["input_ids"]} <= {t for one in rows for t in one["input_ids"]}


def test_texts_of_a_pair_range_from_the_same_to_nothing_in_common() -> None:
    overlaps = [
        len(set(first) & set(second)) / len(set(first) | set(second))
        for first, second in map(texts_of, vary(PAIRS, 500, [CLS, SEP], share=1))
    ]
    for low in (0.0, 0.25, 0.5, 0.75):
        assert sum(low <= overlap <= low + 0.25 for overlap in overlaps) > 20


def test_the_share_is_of_made_up_rows_and_every_row_is_used_as_often_as_any_other() -> None:
    assert sorted(map(str, vary(PAIRS, 12, [CLS, SEP], share=0))) == sorted(map(str, PAIRS * 2))
    real = sum(one in PAIRS for one in vary(PAIRS, 1000, [CLS, SEP], share=0.5))
    assert 450 < real < 600


def test_unknown_and_masked_words_are_text() -> None:
    tokenizer = SimpleNamespace(all_special_ids=[0, 1, CLS, SEP, 103], unk_token_id=1, mask_token_id=103)
    assert special_ids(tokenizer) == {0, CLS, SEP}  # type: ignore[arg-type]


def test_the_same_seed_makes_the_same_rows() -> None:
    assert vary(PAIRS, 50, [CLS, SEP], seed=3) == vary(PAIRS, 50, [CLS, SEP], seed=3)
    assert vary(PAIRS, 50, [CLS, SEP], seed=3) != vary(PAIRS, 50, [CLS, SEP], seed=4)


def test_the_longest_text_is_cut() -> None:
    for made in vary(PAIRS, 100, [CLS, SEP], share=1, max_length=8):
        texts = texts_of(made)
        assert len(made["input_ids"]) <= 8 and made == row(*texts)
    assert all(len(one["input_ids"]) == 3 for one in vary(PAIRS, 20, [CLS, SEP], share=1, max_length=2))


def test_a_tokenizer_without_token_types() -> None:
    rows = [{name: values for name, values in one.items() if name != "token_type_ids"} for one in SINGLE]
    assert all(list(made) == ["input_ids", "attention_mask"] for made in vary(rows, 20, [CLS, SEP], share=1))


def test_multiple_choices_are_only_repeated() -> None:
    rows = [{name: [values, values] for name, values in one.items()} for one in PAIRS]
    assert all(made in rows for made in vary(rows, 20, [CLS, SEP], share=1))


def test_rows_without_any_text_are_only_repeated() -> None:
    assert all(made["input_ids"] == [CLS, SEP] for made in vary([row([])], 5, [CLS, SEP], share=1))
