"""The GLUE benchmark: which runs there are, what a run writes, and the table made of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import BertModel, BertTokenizerFast

from benchmarks.glue import scores as bench
from benchmarks.glue import transfers
from benchmarks.report import glue as report
from benchmarks.report import glue_tables as table
from tests.helpers.models import bert_config

KEYS = {
    "task",
    "variant",
    "transfer",
    "seed",
    "score",
    "model",
    "train_rows",
    "epochs",
    "parameters",
    "train_seconds",
    "examples_per_second",
    "versions",
    "commit",
}


def test_the_runs_are_the_table_that_was_promised() -> None:
    runs = bench.all_runs(["a", "b", "c"])
    assert len(set(runs)) == len(runs) == len({run.name for run in runs})
    with_transfer = {(run.variant, run.task) for run in runs if run.seed == 0 and run.transfer}
    assert with_transfer == {(variant, task) for variant in bench.VARIANTS[1:] for task in bench.TASKS}
    fresh = {(run.variant, run.task) for run in runs if not run.transfer and run.variant != "stock"}
    without = (*bench.VARIANTS[1:], "random-handcrafted")
    assert fresh == {(variant, task) for variant in without for task in ("sst2", "mrpc")}
    seeds = {(run.variant, run.task) for run in runs if run.seed == 2}
    assert seeds == {(variant, task) for variant in ("stock", "a", "b", "c") for task in ("mrpc", "stsb", "sst2")}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The benchmark on a tiny model and a handful of rows."""
    words = ["good", "bad", "film", "plot", "the", "is", "not", "."]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(0)
    BertModel(bert_config(vocab_size=len(vocabulary))).save_pretrained(model)
    for name in bench.TASKS:
        (tmp_path / "glue" / name).mkdir(parents=True)
        rows = [
            {
                "sentence": f"the {words[n % 4]} film is {words[n % 2]}",
                "sentence1": f"the {words[n % 4]} film",
                "sentence2": f"the {words[n % 2]} plot",
                "label": n % 2,
            }
            for n in range(12)
        ]
        for split in ("train", "validation"):
            path = tmp_path / "glue" / name / f"{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "MAX_LENGTH", 16)
    monkeypatch.setattr(bench, "EPOCHS", dict.fromkeys(bench.TASKS, 1))
    monkeypatch.setattr(bench, "TRANSFER_EPOCHS", dict.fromkeys(bench.TASKS, 4))
    return [
        f"--glue_dir={tmp_path / 'glue'}",
        f"--model={model}",
        f"--work_dir={tmp_path / 'work'}",
        "--tasks",
        "sst2",
    ]


def test_a_run_writes_what_the_table_needs_and_is_not_repeated(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    chosen = [*tiny, "--seeds", "0", "--variants", "stock", "random", "hybrid"]
    bench.main(chosen)
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert set(results) == {
        "sst2-stock-fresh-seed0.json",
        "sst2-random-transfer-seed0.json",
        "sst2-random-fresh-seed0.json",
        "sst2-hybrid-transfer-seed0.json",
        "sst2-hybrid-fresh-seed0.json",
    }
    for row in results.values():
        assert set(row) >= KEYS and 0 <= row["score"] <= 1
        assert row["score"] == max(tried["score"] for tried in row["tried"]) and len(row["tried"]) == 2
    assert len(results["sst2-hybrid-transfer-seed0.json"]["hybrid"]) == 1
    transferred, stock = results["sst2-random-transfer-seed0.json"], results["sst2-stock-fresh-seed0.json"]
    assert transferred["teacher"] == "stock, fine-tuned on sst2" and transferred["transfer_seconds"] > 0
    assert (transferred["transfer_rows"], transferred["transfer_steps"]) == (48, 3)
    assert 0 <= transferred["score_before_finetuning"] <= 1
    assert stock["teacher"] is stock["transfer_steps"] is None and stock["transfer_seconds"] == 0
    bench.main(chosen)
    assert "5 of 5 runs are there" in capsys.readouterr().out
    document = tmp_path / "guide.md"
    document.write_text("# Guide\n<!-- table: glue (benchmarks/report/glue.py) -->\n<!-- end of table -->\nMore.\n")
    where = [f"--results={tmp_path / 'results'}", "--documents", str(document)]
    with pytest.raises(SystemExit, match="disagree"):
        report.main([*where, "--check"])
    report.main(where)
    report.main([*where, "--check"])
    assert "| `hybrid` |" in document.read_text() and document.read_text().endswith("-->\nMore.\n")
    assert (tmp_path / "results" / "scores.png").stat().st_size > 1000


def test_a_teacher_is_stock_at_its_better_rate_and_is_made_again_where_it_is_missing(
    tiny: list[str], tmp_path: Path
) -> None:
    bench.main([*tiny, "--seeds", "0", "--variants", "stock"])
    path = tmp_path / "work" / "teachers" / "sst2-seed0.pt"
    kept = torch.load(path, weights_only=True)
    path.unlink()
    again = bench.Bench(bench.arguments_of(tiny)).teacher(bench.Run("sst2", "random", True, 0))
    assert path.exists()
    torch.testing.assert_close(again.state_dict(), kept)


def test_probes_measure_recipes_on_one_task_and_are_not_repeated(tiny: list[str], tmp_path: Path) -> None:
    output = tmp_path / "probes.csv"
    asked = [*tiny[:3], f"--output={output}", "--task=sst2", "--variants", "random", "--recipes", "closed-form"]
    transfers.main(asked)
    text = output.read_text()
    (row,) = csv.DictReader(text.splitlines())
    assert row["recipe"] == "closed-form" and float(row["divergence_after"]) <= float(row["divergence_before"])
    transfers.main(asked)
    assert output.read_text() == text


@pytest.mark.parametrize(("task", "form"), [("sst2", "[CLS] {} [SEP]"), ("mrpc", "[CLS] {} [SEP] {} [SEP]")])
def test_a_probe_may_take_text_from_elsewhere(task: str, form: str, tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" = The film = \n\n the bad film . the plot is not good . the film is not bad . good\n")
    settings = bench.Bench(bench.arguments_of(tiny))
    rows = transfers.foreign_rows(settings, path, pairs=task == "mrpc")
    # Sentences of five words and more are left; the last one has none after it.
    assert [settings.tokenizer.decode(row["input_ids"]) for row in rows] == [
        form.format("the plot is not good", "the film is not bad")
    ]
    batches, options = transfers.texts(settings, task, path, epochs=2, foreign=0.5, share=0.0, batch_size=1)
    texts = [settings.tokenizer.decode(batch["input_ids"][0]) for batch in batches]
    assert len(texts) == 24 and sum("plot is not good" in text for text in texts) == 12
    assert options["steps"][1] == 24


def test_the_table_is_relative_to_stock_on_the_same_task_and_seed() -> None:
    def row(task: str, variant: str, seed: int, score: float, transfer: bool = True) -> dict:
        numbers = {"parameters": 1e6, "transfer_seconds": 5.0, "train_seconds": 10.0, "examples_per_second": 100.0}
        numbers |= {"model": "m", "machine": "x", "threads": 1, "versions": {"torch": "2", "transformers": "5"}}
        numbers |= {"commit": "0123456789", "score_before_finetuning": 0.9 * score if transfer else None}
        return {"task": task, "variant": variant, "seed": seed, "score": score, "transfer": transfer, **numbers}

    results = [
        row("mrpc", "stock", 0, 0.8, False),
        row("mrpc", "stock", 1, 0.9, False),
        row("sst2", "stock", 0, 0.5, False),
        row("mrpc", "dense", 0, 0.72),  # 0.9 of stock
        row("mrpc", "dense", 1, 0.72),  # 0.8 of stock
        row("sst2", "dense", 0, 0.5),  # 1.0 of stock
    ]
    dense = [r for r in results if r["variant"] == "dense"]
    assert table.mean_relative(dense, results) == pytest.approx((0.85 + 1.0) / 2)
    lines = table.table(results).splitlines()
    assert lines[2].startswith("| stock |") and "80.0" not in lines[2] and "85.0 ± 7.1" in lines[2]
    assert lines[3].startswith("| `dense` |") and "92.5% (2 of 5 tasks) | 83.2% |" in lines[3]
    results.append(row("mrpc", "dense", 0, 0.6, transfer=False))
    assert table.against_fresh("dense", results) == (["mrpc"], pytest.approx(0.9), pytest.approx(0.75))


def test_the_documents_say_what_the_results_say() -> None:
    report.main(["--check"])
