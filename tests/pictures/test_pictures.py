"""The page of attention: what is in it, and that nothing of a text gets out of it. A browser reads it in tests/page."""

from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertModel, PreTrainedTokenizerFast

from hf_synthesizer import InvalidConfigError, attention_page, patch_model
from hf_synthesizer.pictures.recorded import record
from hf_synthesizer.pictures.tables import describe_table, tables_of
from tests.helpers.models import batch, build
from tests.helpers.word_tokenizer import tokenizer

NASTY = "</script><img/src=x/onerror=alert(1)><!--&amp;"


def words(*more: str) -> PreTrainedTokenizerFast:
    """A tokenizer that takes whatever stands between spaces as it is."""
    fast = Tokenizer(
        models.WordLevel({"[UNK]": 0, "the": 1, "film": 2, **{word: 3 + n for n, word in enumerate(more)}}, "[UNK]")
    )
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]")


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def unpacked(packed: str, length: int) -> torch.Tensor:
    levels = np.frombuffer(base64.b64decode(packed), dtype="<u2").astype("float32") / 65535
    return torch.from_numpy(levels).view(length, -1)


def test_the_page_holds_every_weight_of_both_models() -> None:
    stock = build("BertForSequenceClassification")
    model = patch_model(copy.deepcopy(stock), {0: "random", 1: "dense+salience"}).train()
    data = data_of(attention_page(model, ["w4 w5 w6", "w7"], stock, tokenizer=tokenizer()))
    assert [text["tokens"] for text in data["texts"]] == [
        ["[CLS]", "w4", "w5", "w6", "[SEP]"],
        ["[CLS]", "w7", "[SEP]"],
    ]
    inputs = tokenizer()("w4 w5 w6", return_tensors="pt")
    for side, which in (("layers", model), ("teacher", stock)):
        for shown, layer in zip(data["texts"][0][side], record(which, inputs), strict=True):
            assert (shown["label"], shown["attention"]) == (layer.label, layer.attention)
            for head, weights in zip(shown["heads"], layer.weights[0], strict=True):
                torch.testing.assert_close(unpacked(head, 5), weights, atol=1e-5, rtol=0)
    assert [layer["attention"] for layer in data["texts"][0]["layers"]] == ["random", "dense+salience"]
    assert {layer: [table["part"] for table in tables] for layer, tables in data["tables"].items()} == {
        "encoder.0": ["random"],
        "encoder.1": ["dense", "dense"],
    }
    assert model.training and model.config._attn_implementation == "sdpa"


def test_numbers_of_both_signs_are_shown_around_the_middle_of_their_scale() -> None:
    model = patch_model(build("BertModel"), "dense")
    columns, bias = data_of(attention_page(model, "w4 w5", tokenizer=tokenizer()))["tables"]["encoder.0"]
    assert columns["signed"] and not bias["signed"]
    wanted = next(table for table in tables_of(model) if table.symbol == "W2").values[..., :4]
    for shown, words, values in zip(columns["heads"], columns["words"], wanted, strict=True):
        top = values.abs().max()
        torch.testing.assert_close(unpacked(shown, columns["rows"]), 0.5 + values / (2 * top), atol=1e-5, rtol=0)
        assert f"±{top:.2g}" in words


def test_a_page_does_not_tell_where_its_model_lies(tmp_path: Path) -> None:
    folder = tmp_path / "somewhere" / "my-model"
    build("BertModel").save_pretrained(folder)
    page = attention_page(BertModel.from_pretrained(folder), "w4", tokenizer=tokenizer())
    assert "Attention of my-model" in page and "somewhere" not in page


@pytest.mark.parametrize("head", ["T5ForConditionalGeneration", "BertLMHeadModel"])
def test_decoders_are_recorded_too(head: str) -> None:
    model = patch_model(build(head), "factorized_random")
    layers = record(model, {name: tensor for name, tensor in batch(head).items() if not name.startswith("decoder")})
    labels = (
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"] if head.startswith("T5") else ["encoder.0", "encoder.1"]
    )
    assert [layer.label for layer in layers] == labels
    assert all(layer.weights.shape == (3, 3, 8, 8) for layer in layers)


def test_the_page_is_one_file_and_escapes_what_a_text_contains() -> None:
    model = patch_model(build("BertModel"), "random")
    page = attention_page(model, f"the {NASTY} film", tokenizer=words(NASTY), title=NASTY)
    assert data_of(page)["texts"][0]["tokens"] == ["the", NASTY, "film"]
    assert NASTY not in page and "<img" not in page and page.count("</script>") == 2
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|https?:", page)
    assert "default-src 'none'" in page


def test_a_page_needs_texts_and_a_tokenizer() -> None:
    model = build("BertModel")
    with pytest.raises(InvalidConfigError, match="no texts"):
        attention_page(model, [], tokenizer=tokenizer())
    with pytest.raises(InvalidConfigError, match="pass tokenizer="):
        attention_page(model, "w4")


def test_a_table_is_put_into_words() -> None:
    model = patch_model(build("BertModel", num_attention_heads=8), "random", init="handcrafted", max_length=12)
    table = tables_of(model)[0]
    assert table.is_static and table.values.shape == (8, 12, 12)
    said = [describe_table(table, head, 12) for head in range(8)]
    assert "at itself" in said[0] and "at the next token" in said[1] and "at the token before" in said[2]
    assert "about alike" in said[7]
