"""The benchmark of heads: which runs there are, what each point writes, and that nothing is measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.test_glue_benchmark import bench as glue
from tests.test_glue_benchmark import load, tiny  # noqa: F401  (a fixture)

heads = load("heads")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
blocks = load("blocks")


def test_the_runs_are_the_curve_that_was_promised() -> None:
    runs = heads.all_runs()
    assert len(set(runs)) == len(runs) == len({run.path for run in runs})
    for task in ("cola", "sst2", "mrpc", "stsb", "rte"):
        own = [run for run in runs if run.task == task and run.seed == 0 and run.by == "heads"]
        assert {(run.variant, run.share) for run in own} == {
            ("stock", 0),
            *((variant, share) for variant in heads.VARIANTS for share in (25, 50, 75, 90, 95, 100)),
        }
    assert {run.task for run in runs if run.seed == 2} == {"mrpc", "stsb", "rte"}
    assert {run.share for run in runs if run.by == "layers"} == {25, 50, 75, 90, 95}


def test_a_run_has_three_points_and_none_is_measured_twice(
    tiny: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for name in ("MAX_LENGTH", "EPOCHS", "TRANSFER_EPOCHS", "RESULTS"):
        monkeypatch.setattr(heads.benchmark, name, getattr(glue, name))
    monkeypatch.setattr(heads, "RESULTS", tmp_path / "heads")
    chosen = [*tiny, "--quick", "--seeds", "0", "--shares", "0", "50", "--variants", "stock", "random+salience"]
    heads.main([*chosen, "--points", "closed"])
    heads.main(chosen)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "heads").glob("*.json")}
    name = "sst2-random+salience-50-{}-seed0"
    assert set(results) == {"sst2-stock-seed0", name.format("heads"), name.format("layers")}
    assert set(results["sst2-stock-seed0"]["points"]) == {"closed", "finetuned"}
    for by in ("heads", "layers"):
        assert list(results[name.format(by)]["points"]) == ["closed", "transfer", "finetuned"]
    some = results[name.format("heads")]
    assert sum(map(len, some["layers"].values())) == 3 and 0.5 < some["cache_share"] < 1
    assert some["points"]["transfer"]["transfer_steps"] == 1
    alike = [results[one]["points"]["finetuned"] for one in ("sst2-stock-seed0", name.format("heads"))]
    assert [(one["epochs"], one["learning_rate"], one["finetuned_rows"]) for one in alike] == [(1, 5e-5, 12)] * 2
    assert list(results[name.format("layers")]["layers"].values()) == [None]
    heads.main(chosen)
    assert "3 of 3 runs are there" in capsys.readouterr().out


@pytest.mark.parametrize(("percent", "comparing"), [(50, 6), (75, 3), (90, 1)])
def test_blocks_with_some_heads_synthesized(percent: int, comparing: int) -> None:
    found = blocks.synthesized_heads(percent)
    assert len(found) == 12 - comparing and len(set(found)) == len(found)
    block = blocks.build(f"random [{percent}% of heads]", 8, torch.float32)
    assert block.attention.synthesizer.config.stock_heads == tuple(h for h in range(12) if h not in found)
    assert block(torch.randn(2, 8, blocks.WIDTH), None).shape == (2, 8, blocks.WIDTH)
