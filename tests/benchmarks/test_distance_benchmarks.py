"""The benchmarks of distances and windows: what each run writes, and the tables of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.heads import by_distance
from benchmarks.pretrained import decoder_plans
from benchmarks.report import distance_tables
from tests.benchmarks.test_glue_benchmark import tiny  # noqa: F401  (a fixture)
from tests.helpers.task_rows import write_model, write_paper_data


def read(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_tables_and_distances_are_taught_on_the_same_rows(
    tiny: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(by_distance, "RESULTS", tmp_path / "by_distance")
    monkeypatch.setattr(distance_tables, "ENCODERS", tmp_path / "by_distance")
    names = ["stock", "random+salience-50-heads", "relative+salience-50-heads", "own_token-50-heads"]
    names += ["zeroed-50-heads", "relative+salience-50-heads"]
    wanted = [f"sst2-{name}-seed0{'-short' if place == 5 else ''}" for place, name in enumerate(names)]
    asked = [*tiny, "--quick", "--only", *wanted]
    by_distance.main(asked)
    results = read(tmp_path / "by_distance")
    assert set(results) == set(wanted)
    assert all(row["score_long"] is None for row in results.values())  # tiny rows are short
    assert results["sst2-relative+salience-50-heads-seed0-short"]["short"]
    by_distance.main(asked)
    assert "6 of 6 runs are there" in capsys.readouterr().out
    table = distance_tables.encoders()
    assert "| `relative+salience` | 50 % | all |" in table and "| the same heads zeroed | 50 % |" in table


def test_a_plan_of_a_decoder_is_judged_on_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_paper_data(tmp_path)
    write_model("llama", tmp_path / "smollm2")
    monkeypatch.setattr(distance_tables, "DECODERS", tmp_path / "work" / "quick" / "results")
    names = ["stock-closed", *(f"none-{point}" for point in decoder_plans.POINTS)]
    asked = [f"--weights={tmp_path}", f"--data={tmp_path}", f"--work_dir={tmp_path / 'work'}", "--quick"]
    decoder_plans.main([*asked, "--only", *names])
    results = read(distance_tables.DECODERS)
    assert set(results) == set(names)
    assert results["none-taught"]["steps"] == 4 and results["stock-closed"]["metrics"]["cache_share"] == 1
    assert results["none-closed"]["metrics"]["cache_share"] < 1
    for name in names[1:]:
        heads = [head for kinds in results[name]["heads"].values() for found in kinds.values() for head in found]
        assert len(heads) == sum(len(set(range(4))) for _ in results[name]["heads"])  # all heads of all layers
    table = distance_tables.decoders()
    assert table.count("none sees all tokens") == len(decoder_plans.POINTS)
