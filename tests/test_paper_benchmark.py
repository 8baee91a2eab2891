"""The benchmark of the paper's tasks: which runs there are, what a run writes, and the tables made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.task_rows import GERMAN, pairs, sentences, write_json, write_model, write_text
from tests.test_glue_benchmark import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
bench = load("paper")

KEYS = {"task", "variant", "seed", "score", "metrics", "parameters", "train_steps", "train_seconds", "versions", "commit"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data under the names of the real one, and a tiny T5."""
    folder = tmp_path_factory.mktemp("paper")
    for name in ("mt", "lm", "summ"):
        (folder / name).mkdir()
    for split, count in {"train": 20, "test_2016_flickr": 6}.items():
        rows = pairs(count, 0)
        for language in ("de", "en"):
            path = folder / "mt" / f"multi30k.{split}.{language}"
            path.write_text("".join(row[language] + "\n" for row in rows))
    for split in ("train", "test"):
        write_text(folder / "lm" / f"wikitext-2-raw.{split}.txt", 80, 0)
        texts = sentences(6, 1, GERMAN)
        names = ("summary",) if split == "train" else ("summary1", "summary2", "summary3")
        dialogues = [{"dialogue": text, **dict.fromkeys(names, text)} for text in texts]
        write_json(folder / "summ" / f"dialogsum.{'dev' if split == 'train' else split}.jsonl", dialogues)
    write_model("t5", folder / "t5")
    return folder


def test_the_runs_are_the_tables_that_were_promised() -> None:
    runs = bench.all_runs()
    assert len(set(runs)) == len(runs) == len({run.path for run in runs}) == 11 * (3 + 3 + 1 + 1)
    assert {run.variant for run in runs} == set(bench.VARIANTS) and "dot_product" in bench.VARIANTS
    assert {run.task for run in runs if run.seed == 2} == {"clm", "translation"}


@pytest.mark.parametrize("task", ["clm", "translation", "mlm", "summarization"])
def test_every_task_runs_and_is_not_repeated(
    task: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    variants = ["dot_product", "fixed_random", "random+dot_product"]
    asked = ["--quick", f"--data={data}", f"--work_dir={tmp_path}", f"--weights={data / 't5'}", "--tasks", task]
    asked += ["--seeds", "0", "--variants", *variants]
    bench.main(asked)
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert set(results) == {f"{task}-{variant}-seed0.json" for variant in variants}
    for row in results.values():
        assert set(row) >= KEYS and row["score"] == row["metrics"][row["score_name"]]
        assert row["train_steps"] == results[f"{task}-dot_product-seed0.json"]["train_steps"] == 2
    mixed, stock = (results[f"{task}-{name}-seed0.json"]["parameters"] for name in ("random+dot_product", "dot_product"))
    assert mixed > stock
    bench.main(asked)
    assert "3 of 3 runs are there" in capsys.readouterr().out
