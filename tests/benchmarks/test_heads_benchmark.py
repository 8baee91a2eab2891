"""The benchmark of heads: which runs there are, what each point writes, and that nothing is measured twice."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.block import blocks
from benchmarks.glue import scores as glue
from benchmarks.heads import curve as heads
from benchmarks.heads import head_orders, key_orders, value_biases
from benchmarks.report import heads as report
from benchmarks.report import heads_plot
from benchmarks.report import heads_tables as table
from hf_synthesizer import patch_model, suggest_heads, transfer_attention
from tests.benchmarks.test_glue_benchmark import tiny  # noqa: F401  (a fixture)


def test_the_runs_are_the_curve_that_was_promised() -> None:
    runs = heads.all_runs()
    assert len(set(runs)) == len(runs) == len({run.name for run in runs})
    for task in ("cola", "sst2", "mrpc", "stsb", "rte"):
        own = [run for run in runs if run.task == task and run.seed == 0 and run.by == "heads"]
        assert {(run.variant, run.share) for run in own} == {
            ("stock", 0),
            *((variant, share) for variant in heads.VARIANTS for share in (25, 50, 75, 90, 95, 100)),
        }
    seeds = [run for run in runs if run.seed == 2]
    assert {(run.task, run.variant, run.share) for run in seeds} == {
        (task, variant, share)
        for task in ("cola", "mrpc", "stsb", "rte")
        for variant, share in [("stock", 0), *(("random+salience", share) for share in (50, 75, 90, 95))]
    }
    assert {run.share for run in runs if run.by == "layers"} == {25, 50, 75}  # of six layers 90 % are all


def test_a_run_has_its_points_and_none_is_measured_twice(
    tiny: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(heads, "RESULTS", tmp_path / "heads")
    chosen = [*tiny, "--quick", "--seeds", "0", "--shares", "0", "50", "--variants", "stock", "random+salience"]
    heads.main([*chosen, "--points", "closed"])
    heads.main(chosen)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "heads").glob("*.json")}
    name = "sst2-random+salience-50-{}-seed0"
    assert set(results) == {"sst2-stock-seed0", name.format("heads"), name.format("layers")}
    assert set(results["sst2-stock-seed0"]["points"]) == {"closed", "finetuned", "epoch"}
    assert list(results[name.format("heads")]["points"]) == ["closed", "transfer", "finetuned", "epoch"]
    assert list(results[name.format("layers")]["points"]) == ["closed", "transfer", "finetuned"]
    some = results[name.format("heads")]
    assert sum(map(len, some["layers"].values())) == 3 and 0.5 < some["cache_share"] < 1
    assert some["points"]["transfer"]["transfer_steps"] == 1
    alike = [results[one]["points"]["finetuned"] for one in ("sst2-stock-seed0", name.format("heads"))]
    assert [(one["epochs"], one["learning_rate"], one["finetuned_rows"]) for one in alike] == [(1, 5e-5, 12)] * 2
    assert list(results[name.format("layers")]["layers"].values()) == [None]
    heads.main(chosen)
    assert "3 of 3 runs are there" in capsys.readouterr().out


@pytest.mark.parametrize("variant", heads.VARIANTS)
def test_heads_that_are_taken_from_a_whole_model_are_those_of_a_transfer_of_their_own(
    tiny: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
) -> None:
    bench = heads.Bench(heads.arguments_of([*tiny, "--quick"]))
    for run in (heads.Run("mrpc", variant, "heads", 50, 0), heads.Run("mrpc", variant, "layers", 50, 0)):
        teacher = bench.stock_teacher(run)
        taken, own = bench.converted(run, teacher), copy.deepcopy(teacher)
        plan = bench.plan(run, teacher)
        patch_model(own, plan, max_length=glue.MAX_LENGTH)
        rows = bench.unlabelled(run, heads.AVERAGED)
        transfer_attention(own, teacher, rows, method="average", autocast=torch.bfloat16)
        expected = own.state_dict()
        for name, tensor in taken.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3)
    suggested = suggest_heads(
        teacher, bench.unlabelled(run, heads.AVERAGED), variant, max_length=glue.MAX_LENGTH, autocast=torch.bfloat16
    )
    assert suggested.order == bench.all_heads(run, teacher).suggestion.order


def test_orders_of_heads_and_of_keys_and_biases_of_values_are_written(
    tiny: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for script, columns in ((head_orders, 2), (key_orders, 5), (value_biases, 8)):
        name = script.__name__.rpartition(".")[2]
        output = tmp_path / f"{name}.csv"
        script.main([*tiny, f"--output={output}", "--batches=1", "--quick"])
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == columns and {row["task"] for row in rows} == {"sst2"}
        if name == "head_orders":
            assert -1 <= float(rows[0]["correlation"]) <= 1 and float(rows[0]["change_95"]) > 0
        elif name == "value_biases":
            assert all(float(row["change_without"]) > 0 < float(row["change_with"]) for row in rows)
        else:
            assert float(rows[0]["left_over"]) == 0 < float(rows[1]["left_over"]) < 1
            assert all(float(row["divergence"]) > 0 for row in rows)


def result(task: str, variant: str, share: int, seed: int = 0, by: str = "heads", **scores: float) -> dict[str, Any]:
    """What a run writes, as far as tables read it."""
    made = {"task": task, "variant": variant, "share": share, "seed": seed, "by": by, "cache_share": 1 - share / 200}
    made |= {
        "model": "m",
        "machine": "x",
        "threads": 1,
        "commit": "c",
        "versions": {"torch": "2", "transformers": "5"},
    }
    return {**made, "points": {point: {"score": score} for point, score in scores.items()}}


def test_the_curve_is_relative_to_stock_fine_tuned_as_often(tmp_path: Path) -> None:
    results = [
        result("mrpc", "stock", 0, closed=0.8, finetuned=1.0),
        result("mrpc", "stock", 0, 1, closed=0.5),
        result("stsb", "stock", 0, closed=0.5),
        result("mrpc", "random", 50, closed=0.8, transfer=0.6, finetuned=0.9),
        result("mrpc", "random", 50, 1, closed=0.45),
        result("stsb", "random", 50, closed=0.4),
        result("rte", "random", 50, closed=0.4),  # no stock, nothing to compare with
    ]
    assert len(table.curve(results).splitlines()[0].split("|")) == 4  # no share has all tasks: no column
    rest = [task for task in table.TASKS if task not in ("mrpc", "stsb")]
    whole = [result(task, "stock", 0, closed=0.5, finetuned=0.5) for task in rest]
    whole += [result(task, "random", 90, closed=0.4, finetuned=0.4) for task in rest]
    whole += [result("stsb", "stock", 0, 1, closed=0.5, finetuned=0.5)]
    whole += [
        result("stsb", "random", 90, 1, closed=0.5, finetuned=0.5),
        result("mrpc", "random", 90, closed=0.8, finetuned=1),
    ]
    assert table.curve([*results[:-1], *whole]).splitlines() == [
        "| heads synthesized | `random`, closed form alone | `random`, fine-tuned on 1,024 rows | cache, to stock |",
        "|---|---:|---:|---:|",
        "| 50 % | 87.5% (MRPC, STS-B) | 90.0% (MRPC) | 0.75 |",
        "| 90 % | 88.0% | 88.0% | 0.55 |",
    ]
    assert table.curve([*results[:-1], *whole], (("random", "heads", "closed"),)).splitlines()[0] == (
        "| heads synthesized | `random`, closed form alone | cache, to stock |"
    )
    assert "| `random` | closed form alone | 50 % |  |  | 95.0% ± 7.1 | 80.0% |  |" in table.tasks(results)
    assert "| `random` | closed form alone | 25, 50, 75, 90, 95, 100 |" in table.missing(results)
    assert "| as it was converted |  |  | 65.0 | 50.0 |  |" in table.stock(results)
    heads_plot.plot([*results, *whole], tmp_path / "curve.png")
    heads_plot.plot_kept([*results, *whole], tmp_path / "kept.png")
    assert all((tmp_path / name).stat().st_size > 5_000 for name in ("curve.png", "kept.png"))


def test_bars_are_judged_on_all_tasks_and_say_by_how_much_they_are_missed() -> None:
    results = [result(task, "stock", 0, closed=0.8, finetuned=0.8) for task in table.TASKS]
    results += [result(task, "random", 90, closed=0.8, finetuned=0.72) for task in table.TASKS]
    results += [result("mrpc", "random", 50, closed=0.8)]  # one task is no mean of five
    lines = table.bars(results).splitlines()
    assert lines[0] == "| heads | asked for | `random`, closed form alone | `random`, fine-tuned on 1,024 rows |"
    assert "| 50 %, five tasks | 99.5% |  |  |" in lines
    assert "| 90 %, five tasks | 98.0% | 100.0% | 90.0% (−8.0) |" in lines
    assert "| 90 %, STS-B | 96.0% | 100.0% | 90.0% (−6.0) |" in lines


def test_the_documents_say_what_was_measured_of_heads() -> None:
    report.main(["--check"])


@pytest.mark.parametrize(("percent", "comparing"), [(50, 6), (75, 3), (90, 1)])
def test_blocks_with_some_heads_synthesized(percent: int, comparing: int) -> None:
    found = blocks.synthesized_heads(percent)
    assert len(found) == 12 - comparing and len(set(found)) == len(found)
    block = blocks.build(f"random [{percent}% of heads]", 8, torch.float32)
    assert block.attention.synthesizer.config.stock_heads == tuple(h for h in range(12) if h not in found)
    assert block(torch.randn(2, 8, blocks.WIDTH), None).shape == (2, 8, blocks.WIDTH)
