"""The benchmark of the paper's tasks: which runs there are, what a run writes, and the tables made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.paper import scores as bench
from benchmarks.report import literature, paper_tables
from benchmarks.report import paper as report
from tests.helpers.task_rows import write_model, write_paper_data

KEYS = {
    "task",
    "variant",
    "seed",
    "score",
    "metrics",
    "parameters",
    "train_steps",
    "train_seconds",
    "versions",
    "commit",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data under the names of the real one, and a tiny T5."""
    folder = tmp_path_factory.mktemp("paper")
    write_paper_data(folder)
    write_model("t5", folder / "flan-t5-small")
    return folder


def test_the_runs_are_the_tables_that_were_promised() -> None:
    runs = bench.all_runs()
    assert len(set(runs)) == len(runs) == len({run.name for run in runs}) == 11 * (3 + 3 + 1 + 1) + 6 * (2 + 2 + 1)
    assert {run.variant for run in runs} == set(bench.VARIANTS) and "dot_product" in bench.VARIANTS
    assert {run.task for run in runs if run.seed == 2} == {"clm", "translation"}
    for task, variants in bench.LONG.items():
        assert set(variants) == set(literature.LITERATURE[task].figures)


@pytest.mark.parametrize("task", ["clm", "translation", "mlm", "summarization"])
def test_every_task_runs_and_is_not_repeated(
    task: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    variants = ["dot_product", "fixed_random", "random+dot_product"]
    asked = ["--quick", f"--data={data}", f"--work_dir={tmp_path}", f"--weights={data}", "--tasks", task]
    asked += ["--seeds", "0", "--variants", *variants]
    bench.main(asked)
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "quick" / "results").glob("*.json")}
    assert set(results) == {f"{task}-{variant}-seed0.json" for variant in variants}
    for row in results.values():
        assert set(row) >= KEYS and row["score"] == row["metrics"][row["score_name"]]
        assert row["train_steps"] == results[f"{task}-dot_product-seed0.json"]["train_steps"] == 2
    mixed, stock = (
        results[f"{task}-{name}-seed0.json"]["parameters"] for name in ("random+dot_product", "dot_product")
    )
    assert mixed > stock
    bench.main(asked)
    assert "3 of 3 runs are there" in capsys.readouterr().out


SIZES = ("width", "layers", "heads", "vocabulary", "max_length", "batch_size", "learning_rate", "test_rows")


def result(task: str, variant: str, score: float, seed: int = 0) -> dict:
    facts = {"parameters": 3e6, "train_seconds": 100.0, "machine": "x", "threads": 1, "commit": "0123456789"}
    versions = {"torch": "2", "transformers": "5"}
    facts |= {"train_rows": 9, "train_steps": 3, "size": dict.fromkeys(SIZES, 1)}
    return {"task": task, "variant": variant, "seed": seed, "score": score, "versions": versions, **facts}


def test_the_table_stands_beside_the_literature(tmp_path: Path) -> None:
    scores = {
        "dot_product": (50.0, 52.0),
        "random": (55.0, 57.2),
        "dense": (54.0,),
        "random+dot_product": (49.0, 51.0),
    }
    rows = [result("clm", name, score, seed) for name, found in scores.items() for seed, score in enumerate(found)]
    lines = paper_tables.table(rows, "clm").splitlines()
    assert lines[2].startswith("| `random+dot_product` | 50.00 ± 1.41 | -2.0% |") and lines[2].endswith("| 40.05 |")
    assert [line.split("|")[1].strip() for line in lines[3:6]] == ["`dot_product`", "`dense`", "`random`"]
    text = lines[-1]
    # There: dot_product, random+dot_product, random, dense; here two neighbouring pairs are swapped.
    assert "Rank correlation (Spearman) over these 4: 0.60." in text
    assert "`random+dot_product` before `dot_product`, `dense` before `random`" in text
    assert "7 of 11 kinds of attention have not been run yet" in text
    assert (
        paper_tables.against(
            [result("translation", "dense", 20.0)], [result("translation", "dot_product", 21.5)], "translation"
        )
        == "-1.50"
    )

    document = tmp_path / "tasks.md"
    document.write_text("# x\n<!-- table: paper-clm (benchmarks/report/paper.py) -->\n<!-- end of table -->\n")
    (tmp_path / "paper").mkdir()
    for row in rows:
        (tmp_path / "paper" / f"{row['variant']}-{row['seed']}.json").write_text(json.dumps(row))
    where = [f"--results={tmp_path}", f"--documents={document}"]
    with pytest.raises(SystemExit, match="disagree"):
        report.main([*where, "--check"])
    report.main(where)
    report.main([*where, "--check"])
    assert "| `dense` |" in document.read_text()


def test_the_document_says_what_the_results_say() -> None:
    report.main(["--check"])
