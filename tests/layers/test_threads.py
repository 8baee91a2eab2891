"""Several threads use one model at the same time, as servers do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import batch, build, first_output
from tests.synthesizers.test_laws import randomize_synthesizers

THREADS, CALLS = 8, 20
SPECS: dict[str, Any] = {
    "random": "random",
    "dot_product": "dot_product",
    "dot_product+salience": "dot_product+salience",
    "random+dot_product": "random+dot_product",
    "heads": [SynthesizerConfig("random+salience", heads=[0, 1])],
}


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Let another thread go on after some ten operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("cached", [False, True], ids=["one pass", "with a cache"])
@pytest.mark.parametrize("head", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("spec", SPECS)
def test_eight_threads_get_the_answers_that_one_gets(spec: str, head: str, cached: bool) -> None:
    model = patch_model(build(head), SPECS[spec])
    randomize_synthesizers(model)
    rows = [batch(head, length=length, padding="left") for length in range(3, 3 + THREADS)]
    expected = [answer(model, given, cached) for given in rows]

    def work(number: int) -> int:
        return sum(not torch.equal(answer(model, rows[number], cached), expected[number]) for _ in range(CALLS))

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == 0


@torch.inference_mode()
def answer(model: PreTrainedModel, given: dict[str, torch.Tensor], cached: bool) -> torch.Tensor:
    if not cached:
        return first_output(model(**given, use_cache=False))
    start = {"input_ids": given["input_ids"][:, :-1], "attention_mask": given["attention_mask"][:, :-1]}
    made = model(**start, use_cache=True).past_key_values
    step = {"input_ids": given["input_ids"][:, -1:], "attention_mask": given["attention_mask"]}
    return first_output(model(**step, past_key_values=made))
