"""A SentenceTransformer wherever a model is taken: its layers are those of the model in it, its answers are its embeddings."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hf_synthesizer import (
    NotPatchedError,
    patch_model,
    patch_report,
    suggest_heads,
    suggest_layers,
    transfer_attention,
)
from hf_synthesizer.cli.app import app
from hf_synthesizer.measuring.costs import cost_report
from hf_synthesizer.peft import lora_config_for
from hf_synthesizer.pictures import attention_page
from hf_synthesizer.plots import plot_attention, plot_synthesizer
from hf_synthesizer.transfer.distill import answer_loss, answers_of
from tests.helpers.glue_rows import write_model
from tests.helpers.models import build
from tests.helpers.teaching import loader


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("BertModel")

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {**features, "token_embeddings": self.model(**inputs)[0]}


class Pooling(nn.Module):
    """The mean over tokens."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        keep = features["attention_mask"].unsqueeze(-1)
        mean = (features["token_embeddings"] * keep).sum(1) / keep.sum(1)
        return {**features, "sentence_embedding": mean}


class SentenceTransformer(nn.Sequential):
    """As the library of that name builds it."""

    max_seq_length = 512


@pytest.fixture
def sentences() -> Any:
    return SentenceTransformer(Transformer(), Pooling(), Normalize()).eval()


class Normalize(nn.Module):
    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": nn.functional.normalize(features["sentence_embedding"], dim=-1)}


@pytest.fixture
def batches() -> list[dict[str, Any]]:
    """As `SentenceTransformer.preprocess` makes them, with a word about what they are."""
    return [{**inputs, "modality": "text"} for inputs in loader("BertModel")]


def test_reports_pictures_and_adapters_take_a_sentence_transformer(sentences: Any, tmp_path: Path) -> None:
    stock, inner = copy.deepcopy(sentences), sentences[0].model
    assert not patch_report(sentences).swapped
    with pytest.raises(NotPatchedError):
        lora_config_for(sentences)
    patch_model(sentences, "random", max_length=8)
    assert patch_report(sentences) == patch_report(inner) and patch_report(sentences).swapped
    assert cost_report(sentences, [8]) == cost_report(inner, [8])
    assert lora_config_for(sentences).modules_to_save == lora_config_for(inner).modules_to_save
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    assert plot_attention(sentences, inputs, stock).axes and plot_synthesizer(sentences).axes
    write_model(tmp_path)
    from transformers import AutoTokenizer

    page = attention_page(sentences, "good film", stock, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    assert "<html" in page


def test_suggestions_measure_its_embeddings(sentences: Any, batches: list[dict[str, Any]]) -> None:
    answers = answers_of(sentences, batches[0])
    torch.testing.assert_close(answers.square().sum(-1), torch.ones(len(answers)))
    by_layer = suggest_layers(sentences, batches, "random", 1, steps=0, progress=False)
    assert len(by_layer) == 1 and type(sentences[0].model).__name__ == "BertModel"
    by_head = suggest_heads(sentences, batches, "random", [1.0, 2], progress=False)
    of_states = suggest_heads(sentences[0].model, batches, "random", [1.0, 2], progress=False)
    assert by_head.costs != of_states.costs
    whole = patch_model(copy.deepcopy(sentences), by_head.at(1.0), max_length=12)
    assert by_head.curve[6] > 0 and patch_report(whole).swapped


def test_a_transfer_teaches_its_embeddings(sentences: Any, batches: list[dict[str, Any]]) -> None:
    student = patch_model(copy.deepcopy(sentences), "random", max_length=12)
    before = float(answer_loss(student, sentences, batches[0]))
    report = transfer_attention(student, sentences, batches, steps=(4, 4, 8), progress=False)
    assert report.answers_before is not None and report.answers_after is not None
    assert report.answers_after < report.answers_before
    assert float(answer_loss(student, sentences, batches[0])) < before
    assert not student.training and all(parameter.requires_grad for parameter in student.parameters())


def test_the_command_line_keeps_pooling(tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    stock.mkdir()
    write_model(stock)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "T"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "P"},
    ]
    (stock / "modules.json").write_text(json.dumps(modules))
    (stock / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    (stock / "1_Pooling").mkdir()
    (stock / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "texts.txt").write_text("\n".join(["the film is good .", "the plot was bad ?"] * 8))

    def command(*arguments: str) -> None:
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output

    command("patch", str(stock), "--variant=random", "--max-length=16", f"--output={tmp_path / 'converted'}")
    command(
        "transfer", str(tmp_path / "converted"), f"--teacher={stock}", "--steps=2", f"--texts={tmp_path / 'texts.txt'}",
        f"--output={tmp_path / 'taught'}",
    )  # fmt: skip
    for name in ("converted", "taught"):
        folder = tmp_path / name
        assert json.loads((folder / "modules.json").read_text()) == modules
        assert json.loads((folder / "1_Pooling" / "config.json").read_text()) == {"pooling_mode_mean_tokens": True}
        settings = json.loads((folder / "sentence_bert_config.json").read_text())
        assert settings == {"max_seq_length": 16, "do_lower_case": False}
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 16
    modules[1]["path"] = "../outside"
    (stock / "modules.json").write_text(json.dumps(modules))
    done = CliRunner().invoke(app, ["patch", str(stock), "--variant=random", f"--output={tmp_path / 'x'}"])
    assert "names a folder outside" in str(done.exception)
