"""The pictures: what is drawn is what was recorded, learnt or measured, and it is written as PNG and SVG."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from hf_synthesizer import InvalidConfigError, NotPatchedError, SynthesizerConfig, patch_model
from hf_synthesizer.cli.app import app
from hf_synthesizer.pictures.lengths import describe_conditions
from hf_synthesizer.pictures.recorded import record, words_of
from hf_synthesizer.plots import (
    plot_attention,
    plot_lengths,
    plot_suggestion,
    plot_synthesizer,
    plot_training,
    plot_transfer,
    save,
)
from hf_synthesizer.synthesizers.head_sizes import HeadShape
from hf_synthesizer.transfer import LayerTransfer, Suggestion, TransferReport
from hf_synthesizer.transfer.budgets import ResourceBudget
from tests.helpers.models import build
from tests.helpers.word_tokenizer import tokenizer

HYBRID = {0: "random", 1: "factorized_random", 2: "dense+salience", 3: "factorized_dense"}
SUGGESTION = Suggestion({0: "random"}, {"encoder.0": 0.1, "encoder.1": 0.4}, {"encoder.0": 0.1})
HEADS = Suggestion.of_heads(
    SynthesizerConfig("random"), {0: [0.01, 0.0, 0.25], 1: [0.04, 0.09, 0.16]}, 4, {2: 0.01, 4: 0.1}
)
REPORT = TransferReport((LayerTransfer("encoder.0", "random", 0.9, 0.2),), 0.8, 0.1, 30, 1.0)
HISTORY = [
    *({"loss": 1.0 / step, "step": step, "learning_rate": 0.1, "grad_norm": 1.0} for step in (1, 2, 3)),
    {"eval_loss": 0.4, "eval_accuracy": 0.7, "eval_runtime": 1.0, "eval_samples_per_second": 9.0, "step": 3},
    {"train_loss": 0.6, "train_runtime": 3.0, "step": 3},
]


@pytest.fixture
def stock() -> Any:
    return build("BertForSequenceClassification", num_hidden_layers=5)


@pytest.fixture
def model(stock: Any) -> Any:
    return patch_model(copy.deepcopy(stock), HYBRID)


def maps(figure: Figure) -> list[torch.Tensor]:
    return [torch.as_tensor(axis.images[0].get_array().data) for axis in figure.axes if axis.images]


def test_attention_is_drawn_beside_stock_and_their_difference(stock: Any, model: Any, tmp_path: Path) -> None:
    inputs = tokenizer()("w4 w5 w6 $", return_tensors="pt")
    figure = plot_attention(model, inputs, stock, tokenizer=tokenizer(), layers=[0, 2], heads=[1])
    ours, theirs = (record(which, inputs)[2].weights[0, 1] for which in (model, stock))
    drawn = maps(figure)
    assert len(drawn) == 2 * 3
    for shown, wanted in zip(drawn[3:], (ours, theirs, ours - theirs), strict=True):
        torch.testing.assert_close(shown, wanted)
    last = figure.axes[-1]
    assert [label.get_text() for label in last.get_xticklabels()] == ["[CLS]", "w4", "w5", "w6", "[UNK]", "[SEP]"]
    for ending in ("png", "svg"):
        assert save(figure, tmp_path / f"attention.{ending}").stat().st_size > 5_000
    assert b"<svg" in (tmp_path / "attention.svg").read_bytes()
    assert len(maps(plot_attention(model, inputs))) == 4 * 3  # four layers of five, all of three heads
    with pytest.raises(InvalidConfigError, match="no layer 5: they are 0 to 4"):
        plot_attention(model, inputs, layers=[5])
    with pytest.raises(InvalidConfigError, match="PNG|png or .svg"):
        save(figure, tmp_path / "attention.bmp")


def test_every_kind_of_table_is_drawn(stock: Any, model: Any) -> None:
    figure = plot_synthesizer(model, heads=[0, 2])
    names = [axis.get_ylabel().split("\n")[1] for axis in figure.axes if axis.get_ylabel()]
    assert names == [
        "random: R",
        "factorized_random: R1 · R2ᵀ",
        "dense: W2",
        "dense: b2",
        "salience: u",
        "factorized_dense: WA",
        "factorized_dense: WB",
    ]
    table = model.bert.encoder.layer[0].attention.self.synthesizer.table
    torch.testing.assert_close(maps(figure)[1], table[2].detach())
    with pytest.raises(NotPatchedError, match="no layer with a learnt table"):
        plot_synthesizer(stock)


def test_reports_and_logs_are_drawn() -> None:
    bars = plot_suggestion(SUGGESTION.to_dict()).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [0.1, 0.4]
    assert [text.get_text() for text in plot_transfer(REPORT.to_dict()).axes[0].get_yticklabels()] == [
        "encoder.0  random"
    ]
    loss, score = plot_training(HISTORY).axes
    assert [line.get_label() for line in loss.lines] == ["loss", "eval_loss"]
    assert list(loss.lines[0].get_ydata()) == [1.0, 0.5, 1 / 3]
    assert [line.get_label() for line in score.lines] == ["eval_accuracy"]
    lines = plot_lengths(
        {"stock sdpa": [(128, 1.0)], "random": [(128, 2.0)], "random (fused)": [(128, 3.0)]}, "speed"
    ).axes[0]
    stock, random, fused = lines.lines
    assert stock.get_color() == "#000000" and random.get_color() == fused.get_color() and fused.get_linestyle() == "--"
    for draw, nothing in ((plot_suggestion, {"hybrid": {"0": "random"}}), (plot_transfer, {}), (plot_training, [])):
        with pytest.raises(InvalidConfigError):
            draw(nothing)  # type: ignore[operator]
    with pytest.raises(InvalidConfigError):
        plot_lengths({}, "speed")


def test_many_lines_are_drawn_in_a_panel_for_each_kind() -> None:
    names = [
        "stock sdpa",
        "stock eager",
        "floor",
        "random",
        "random (fused)",
        "dense",
        "random+dot_product",
        "fnet",
        "routing",
    ]
    figure = plot_lengths({name: [(128, 1.0), (512, 2.0)] for name in names}, "speed", "training")
    shown = {axis.get_title(): [line.get_label() for line in axis.lines] for axis in figure.axes}
    assert shown == {
        "with a comparison of tokens": ["stock sdpa", "floor", "stock eager", "random+dot_product"],
        "made from each token": ["stock sdpa", "floor", "dense"],
        "tables": ["stock sdpa", "floor", "random", "random (fused)"],
        "peers": ["stock sdpa", "floor", "fnet"],
        "keys chosen first": ["stock sdpa", "floor", "routing"],
    }
    assert figure.get_suptitle() == "training"


def test_each_stack_is_labelled_with_what_it_reads_and_padding_is_left_out() -> None:
    model = build("T5ForConditionalGeneration")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]])}
    inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    inputs["decoder_input_ids"] = torch.tensor([[0, 10, 11, 12, 13], [0, 14, 15, 16, 17]])
    figure = plot_attention(model, inputs, tokenizer=tokenizer(), layers=[0, 3], heads=[0], row=1)
    encoder, decoder = figure.axes
    for axis, ids in ((encoder, [8, 9, 1]), (decoder, [0, 14, 15, 16, 17])):
        names = [label.get_text() for label in axis.get_xticklabels()]
        assert names == [label.get_text() for label in axis.get_yticklabels()]
        assert names == words_of(tokenizer(), ids) and axis.images[0].get_array().shape == (len(ids), len(ids))
    assert "2 of 4 layers, 1 of 3 heads" in figure.get_suptitle()
    with pytest.raises(InvalidConfigError, match="no row 2: the batch has 2"):
        plot_attention(model, inputs, row=2)


def test_of_many_tokens_every_second_or_third_has_its_name() -> None:
    model, length = build("BertModel", max_position_embeddings=64), 64
    figure = plot_attention(model, {"input_ids": torch.full((1, length), 5)}, layers=[0], heads=[0])
    places = figure.axes[0].get_xticks().tolist()
    assert 16 <= len(places) < length and len({b - a for a, b in zip(places, places[1:], strict=False)}) == 1


def test_words_of_a_svg_are_words(tmp_path: Path) -> None:
    save(plot_transfer(REPORT), tmp_path / "a.svg")
    assert ">before</text>" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train-none-float32-dropout-0.1", "training, no padding, float32, dropout 0.1"),
        ("inference-ragged-bfloat16", "inference, ragged lengths, bfloat16"),
    ],
)
def test_conditions_are_told_in_words(name: str, words: str) -> None:
    assert describe_conditions(name) == words


def test_heads_are_drawn_as_a_map_with_the_curve_beside_it() -> None:
    for suggestion in (HEADS, HEADS.to_dict()):
        heads, curve, *_ = plot_suggestion(suggestion).axes
        (image,) = heads.images
        torch.testing.assert_close(
            torch.tensor(image.get_array().data), torch.tensor([[0.1, 0.0, 0.5], [0.2, 0.3, 0.4]])
        )
        assert sorted(zip(*heads.lines[0].get_data(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [list(values) for values in curve.lines[0].get_data()] == [[2 / 6, 4 / 6], [0.01, 0.1]]
    alone = Suggestion.of_heads(HEADS.variant, HEADS.costs, 1)
    assert len([axis for axis in plot_suggestion(alone).axes if axis.images]) == 1
    with pytest.raises(InvalidConfigError, match="no suggestion of suggest_layers or suggest_heads"):
        plot_suggestion({**HEADS.to_dict(), "heads": [], "budget": 1})


def test_each_kind_of_heads_has_a_colour() -> None:
    kinds = [SynthesizerConfig("relative"), SynthesizerConfig("dot_product", window=3)]
    shapes = {0: HeadShape(16, 8), 1: HeadShape(16, 8)}
    curve = {2: 0.1, 3: 0.2, ResourceBudget("multiply_adds", 0.5, 64): 0.3}
    costs = [{0: [0.1, 0.2], 1: [0.3, 0.4]}, {0: [0.2, 0.1], 1: [0.4, 0.5]}]
    menu = Suggestion.of_heads(kinds, costs, 3, curve, shapes=shapes)
    heads, changes, *_ = plot_suggestion(menu.to_dict()).axes
    assert [line.get_label() for line in heads.lines] == ["relative", "dot_product (window=3)"]
    assert [sorted(zip(*line.get_data(), strict=True)) for line in heads.lines] == [[(0, 0), (0, 1)], [(1, 0)]]
    assert len({line.get_color() for line in heads.lines}) == 2
    assert [list(line.get_data()[0]) for line in changes.lines] == [[0.5, 0.75], [0.5]]
    assert len(changes.get_legend().get_texts()) == 2


def test_the_commands_of_plot_write_files(model: Any, stock: Any, tmp_path: Path) -> None:
    for name, which in (("model", model), ("stock", stock)):
        which.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    for name, data in (
        ("plan", SUGGESTION.to_dict()),
        ("heads", HEADS.to_dict()),
        ("report", REPORT.to_dict()),
        ("log", {"log_history": HISTORY}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    conditions = {
        "status": "ok",
        "mode": "train",
        "padding": "none",
        "dtype": "float32",
        "dropout": "0.0",
        "batch_size": "1",
    }
    rows = [{**conditions, "variant": "random", "length": length, "speedup": "2.0"} for length in ("128", "512")]
    table = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (tmp_path / "bench.csv").write_text("\n".join(table) + "\n")
    seen = ("--text=w4 w5", f"--teacher={tmp_path / 'stock'}")
    commands = [
        ("attention", "model", "png", *seen, "--layers=0,1"),
        ("page", "model", "html", *seen),
        ("synthesizer", "model", "svg", "--heads=0"),
        ("suggestion", "plan.json", "png"),
        ("suggestion", "heads.json", "svg"),
        ("transfer", "report.json", "svg"),
        ("training", "log.json", "png"),
        ("benchmark", "bench.csv", "png"),
    ]
    for kind, source, ending, *more in commands:
        output = tmp_path / f"{kind}.{ending}"
        done = CliRunner().invoke(app, ["plot", kind, str(tmp_path / source), f"--output={output}", "--json", *more])
        assert done.exit_code == 0, (kind, done.output, done.exception)
        assert json.loads(done.stdout) == {"output": str(output)} and output.stat().st_size > 3_000
