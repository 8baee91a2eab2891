"""The benchmark of pretrained decoders: which runs there are, what each point writes, and that nothing is measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.task_rows import write_model, write_text
from tests.test_glue_benchmark import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
bench = load("pretrained")


def test_the_runs_are_the_table_that_was_promised() -> None:
    runs = bench.all_runs()
    assert {(run.share, run.by) for run in runs} == {(25, "heads"), (25, "layers"), (50, "heads"), (50, "layers")}
    assert len(set(runs)) == len(runs) == len({run.name for run in runs})


def test_a_run_has_three_points_and_none_is_measured_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights = write_model("llama", tmp_path / "weights")
    (tmp_path / "lm").mkdir()
    for split in ("train", "test"):
        write_text(tmp_path / "lm" / f"wikitext-2-raw.{split}.txt", 120, 0)
    names = ["random+salience-50-heads-seed0", "random-50-layers-seed0"]
    asked = [
        f"--weights={weights}",
        f"--data={tmp_path}",
        f"--work_dir={tmp_path / 'work'}",
        "--quick",
        "--only",
        *names,
    ]
    bench.main([*asked, "--points", "fresh"])
    bench.main(asked)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "work" / "quick").glob("*.json")}
    assert set(results) == set(names)
    for row in results.values():
        assert list(row["points"]) == ["fresh", "closed", "transfer"] and row["stock_perplexity"] > 1
        assert row["points"]["transfer"]["steps"] == 3 and row["points"]["closed"]["steps"] == 0
    assert sum(map(len, results[names[0]]["layers"].values())) == 4  # half of two layers of four heads
    assert list(results[names[1]]["layers"].values()) == [None]
    bench.main(asked)
    assert "2 of 2 runs are there" in capsys.readouterr().out
