"""The tokenizer that lies beside a patched model truncates where the model ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, pipeline

from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import build
from tests.helpers.word_tokenizer import save_tokenizer

BERT, T5 = "BertForSequenceClassification", "T5ForConditionalGeneration"


@pytest.mark.parametrize("patched_at", [10, None])
def test_a_pipeline_truncates_where_the_model_ends(tmp_path: Path, patched_at: int | None) -> None:
    save_tokenizer(tmp_path)
    patch_model(build(BERT), "dense", max_length=patched_at).save_pretrained(tmp_path)
    classify = pipeline("text-classification", str(tmp_path))
    longest = patched_at or 24
    assert classify.tokenizer.model_max_length == longest
    assert classify(" ".join(["w5"] * 40), truncation=True) == classify(" ".join(["w5"] * (longest - 2)))
    assert f"has at most {longest} tokens" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("head", "variant", "found"),
    [
        (T5, {"encoder": "random"}, 9),
        (T5, {"decoder": "random"}, 24),  # what it writes may be shorter than what it reads
        (BERT, {0: SynthesizerConfig("random", max_length=12), 1: SynthesizerConfig("dense", max_length=15)}, 12),
    ],
    ids=["encoder", "decoder", "hybrid"],
)
def test_the_shortest_layer_that_reads_decides(tmp_path: Path, head: str, variant: Any, found: int) -> None:
    save_tokenizer(tmp_path)
    patch_model(build(head), variant, **({"max_length": 9} if head == T5 else {})).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == found


def test_a_tokenizer_that_cannot_be_read_stays(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[not json")
    patch_model(build(BERT), "dense", max_length=9).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == "[not json"
