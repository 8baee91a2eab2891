"""Heads that a checkpoint has no weights for: what they answer is measured nowhere, taught to nobody and judged by no score."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM
from typer.testing import CliRunner

from hf_synthesizer import InvalidConfigError, suggest_heads
from hf_synthesizer.checkpoints.fresh_heads import fresh_weights, remember_fresh
from hf_synthesizer.cli.app import app
from shared.command_line import parse
from shared.model import ModelArguments, load_teacher
from tests.helpers.glue_rows import write_model
from tests.helpers.models import build
from tests.helpers.teaching import HEADS, loader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose config names a masked-language head, and that has no weights of one."""
    (tmp_path / "stock").mkdir()
    write_model(tmp_path / "stock")
    config = tmp_path / "stock" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["BertForMaskedLM"]}))
    (tmp_path / "texts.txt").write_text("\n".join(["the film is good .", "the plot was bad ?"] * 8))
    return tmp_path


def command(*arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON that a command prints, and what it says beside it."""
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_suggest_by_heads_measures_no_head_drawn_at_random(folder: Path) -> None:
    found = []
    for seed, more in ((0, ()), (1, ()), (2, ("--task=fill-mask",)), (3, ("--task=fill-mask",))):
        torch.manual_seed(seed)
        plan, said = command(
            "suggest", str(folder / "stock"), "--by=heads", "--variant=random", "--max-length=16", "--batches=1",
            f"--texts={folder / 'texts.txt'}", *more,
        )  # fmt: skip
        assert "has no weights for cls.predictions.bias" in " ".join(said.split()) or more
        found.append((plan["heads"], plan["curve"]))
    assert found[0] == found[1] and found[2] == found[3]
    for (_, first), (_, second) in zip(found[0][0], found[2][0], strict=True):
        assert first == pytest.approx(second, rel=1e-3)


def test_patch_and_transfer_keep_no_head_drawn_at_random(folder: Path) -> None:
    _, said = command(
        "patch", str(folder / "stock"), "--variant=random", "--max-length=16", f"--output={folder / 'c'}"
    )
    assert "BertModel is loaded instead, without that head" in said
    assert json.loads((folder / "c" / "config.json").read_text())["architectures"] == ["SynthesizerBertModel"]
    taught, said = command(
        "transfer", str(folder / "c"), f"--teacher={folder / 'stock'}", "--steps=2", "--batch-size=8",
        f"--texts={folder / 'texts.txt'}", f"--output={folder / 't'}",
    )  # fmt: skip
    assert taught["steps"] == 2


def test_a_head_that_was_asked_for_is_drawn_and_said_to_be(folder: Path) -> None:
    _, said = command(
        "patch", str(folder / "stock"), "--variant=random", "--max-length=16", f"--output={folder / 'c'}",
        "--task=fill-mask",
    )  # fmt: skip
    assert "initialised at random, and have to be trained" in said
    assert json.loads((folder / "c" / "config.json").read_text())["architectures"] == ["SynthesizerBertForMaskedLM"]


def test_a_head_counts_as_drawn_until_it_is_trained(folder: Path) -> None:
    model, info = AutoModelForMaskedLM.from_pretrained(folder / "stock", output_loading_info=True)
    remember_fresh(model, info)
    assert "cls.predictions.transform.dense.weight" in fresh_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    assert not fresh_weights(model)


@pytest.mark.parametrize("head", HEADS.values())
def test_last_hidden_states_are_answers_whatever_head_there_is(head: str) -> None:
    model, batches = build(head), loader(head)
    name = "classifier" if hasattr(model, "classifier") else "lm_head"
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn = torch.randn_like(getattr(model, name).weight)
        setattr(model, name, torch.nn.Linear(*drawn.T.shape))  # T5's is tied to its embeddings
        getattr(model, name).weight.data = drawn
        suggestion = suggest_heads(model, batches, "random", 2, trained_head=False, progress=False)
        found.append((suggestion.costs, suggestion.curve))
    assert found[0] == found[1]


def test_an_example_judges_and_teaches_no_head_drawn_at_random(folder: Path) -> None:
    run_mlm = importlib.import_module("run_mlm")
    (folder / "text.txt").write_text("the film is good . the plot was bad ?\n" * 40)
    stock = str(folder / "stock")
    flags = [
        f"--validation_file={folder / 'text.txt'}",
        "--max_length=16",
        f"--output_dir={folder / 'out'}",
        "--report_to=none",
    ]
    with pytest.raises(InvalidConfigError, match="Without training, .* has no weights for cls"):
        run_mlm.main([f"--model_name_or_path={stock}", "--do_eval", *flags])
    flags = [*flags, f"--train_file={folder / 'text.txt'}", "--variant=random", "--do_train", "--max_steps=1"]
    with pytest.raises(InvalidConfigError, match="--transfer_answers learns .* has no weights for cls"):
        run_mlm.main([f"--model_name_or_path={stock}", "--transfer_answers=1", *flags])
    [arguments] = parse((ModelArguments,), [f"--model_name_or_path={stock}"])
    teacher = load_teacher(stock, AutoModelForMaskedLM, torch.device("cpu"), arguments)
    assert teacher is not None and "cls.predictions.bias" in fresh_weights(teacher)
