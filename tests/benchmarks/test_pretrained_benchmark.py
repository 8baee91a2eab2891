"""The benchmark of pretrained models: which runs there are, what each point writes, and that nothing is measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.pretrained import scores as bench
from hf_synthesizer import patch_model
from tests.helpers.task_rows import build, write_model, write_paper_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data, a tiny decoder and a tiny T5, under the names of the real ones."""
    folder = tmp_path_factory.mktemp("pretrained")
    write_paper_data(folder)
    write_model("llama", folder / "smollm2")
    write_model("t5", folder / "flan-t5-small")
    return folder


def test_the_runs_are_the_tables_that_were_promised() -> None:
    runs = bench.all_runs()
    assert {(run.share, run.by) for run in runs} == {(25, "heads"), (25, "layers"), (50, "heads"), (50, "layers")}
    assert {run.task for run in runs} == {"smollm2", "smollm2_long", "translation", "summarization"}
    assert len(set(runs)) == len(runs) == len({run.name for run in runs})


@pytest.mark.parametrize("task", ["smollm2", "translation", "summarization"])
def test_a_run_has_three_points_and_is_not_measured_twice(
    task: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    names = [f"{task}-random+salience-50-heads-seed0", f"{task}-random-50-layers-seed0"]
    names = names[task != "smollm2" :]  # an encoder-decoder takes three times as long
    asked = [f"--weights={data}", f"--data={data}", f"--work_dir={tmp_path}", "--quick", "--only", *names]
    bench.main(asked)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "quick" / "results").glob("*.json")}
    assert set(results) == set(names)
    for name, row in results.items():
        apart = ["distance"] * (name == "smollm2-random-50-layers-seed0")
        assert list(row["points"]) == ["fresh", "closed", *apart, "transfer"] and row["stock"] >= 0
        assert row["points"]["transfer"]["steps"] == 3 and row["points"]["closed"]["steps"] == 0
        assert all(found["score"] == found["metrics"][row["score_name"]] for found in row["points"].values())
        costs, chosen = row["costs"], row["layers"]
        if row["by"] == "heads":
            assert sum(map(len, chosen.values())) == sum(map(len, costs.values())) / 2
        else:
            assert len(chosen) == len(costs) / 2 and set(chosen.values()) == {None}
    bench.main(asked)
    assert f"{len(names)} of {len(names)} runs are there" in capsys.readouterr().out


def test_a_table_by_distance_keeps_the_first_token_apart() -> None:
    model = patch_model(build("llama"), "random", max_length=6)
    before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("table")}
    after = bench.by_distance(model).state_dict()
    for name, table in before.items():
        assert torch.equal(after[name][..., 0], table[..., 0])
        for distance in range(5):
            mean = torch.stack([table[:, i, i - distance].exp() for i in range(distance + 1, 6)]).mean(0).log()
            for i in range(distance + 1, 6):
                torch.testing.assert_close(after[name][:, i, i - distance], mean)
    assert before
